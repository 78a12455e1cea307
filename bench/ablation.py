"""What each mechanism of scheduler and planner earns: simulated seconds without it over seconds with it.

- One mechanism of `bench.ablation_parts` is off at a time; the rest is production code, interpreted.
- Scheduler: rows of `bench.fleets_rows` and third epochs, each on engines of one degree (``even``: what the planner
  chooses where lengths cannot be sorted) and of two (``mix``), cheap rows also of three (``wide``).
- Planner: the drifting work of `bench.replan_work`, with and without repartitions.
- Figures are 100 times the mean logarithm of off / on, within a seed, and its standard error: above 0 it earns.
- Decisions that are equal to the last bit on two seeds are taken as equal on all.

Compiled modules take the same decisions; what they earn is in `bench.decisions`.

    python -m bench.ablation [--part scheduler|planner] [--rows NAME|NAME] [--only NAME|NAME] [--trace FILE ...]
        [--engines even|mix|wide] [--seeds 4] [--first-seed 0] [--quick] [--json FILE] [--jobs 1]
"""

from __future__ import annotations

import math
import multiprocessing
import os
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from typing import Any, NamedTuple

from bench import fleets_search
from bench.ablation_parts import PLANNER, SCHEDULER, without
from bench.fleets_rows import EPOCH, NODE, Fleet, Part, Setting, setting_of, trace_name
from bench.fleets_search import OURS, Contestant
from bench.fleets_training import Roles
from bench.harness import Options, names, options, progress, report, write
from bench.replan import FEW, SITE, named_work
from bench.replan_rules import SETTINGS, Live, Tiers, play
from bench.replan_work import WORKLOADS
from libra_hpc import compiled

EVEN_TP = {"documents": 4, "long": 2}
"""Degrees that the search with ``sorted_lengths=False`` chooses for these rows; 8 for the others."""
BOTH, ALL = ("even", "mix"), ("even", "mix", "wide")
SCHEDULER_ROWS: dict[str, tuple[tuple[str, ...], int]] = {
    "r2e": (ALL, 1),
    "search": (ALL, 4),
    "math": (ALL, 4),
    "documents": (ALL, 4),
    "misleading": (BOTH, 1),
    "slow node": (BOTH, 1),
    "steady, eta 1": (BOTH, 1),
    "long": (BOTH, 1),
    "r2e, outcomes tell" + EPOCH: (("mix",), 1),
    "math, siblings tell" + EPOCH: (ALL, 2),
}
"""Engines, and how many times ``--seeds`` seeds: short simulations scatter more."""
PLANNER_ROWS = (*WORKLOADS, "steady", "repartition")
STEPS = 80
"""Steps of a planner's run: two phases of the curriculum, or a whole period."""
SLOW_LOOK = SETTINGS.model_copy(update={"interval_s": 120.0})
"""A sixth of the evaluations of `bench.replan`; a batch takes ten minutes."""
SAME_AFTER = 2
QUICK = ("r2e", "math", "documents")
"""Rows of ``--quick``, of two seeds."""
COLUMNS = ("off", "mean", "earns most", "on", "costs most", "on")

Case = tuple[str, str]
"""(row, engines)."""
Job = tuple[str, str, str, int]
"""(row, engines, mechanism, seed); the mechanism is empty where all is on."""


class Cell(NamedTuple):
    """What a mechanism earns on one row, in 100 log units."""

    mean: float
    error: float
    seeds: int


# --- one simulation


def fleet_of(name: str, row: Setting, engines: str) -> Fleet:
    """Engines of the row's GPUs: a third of the nodes in the smaller degrees, or all of one degree.

    In steady state one node trains.
    """
    gpus = row.pools[0][1] - NODE * bool(row.batches)
    nodes = gpus // NODE
    if engines == "even":
        tp = EVEN_TP.get(name, 8)
        return (Part(0, tp, gpus // tp),)
    if engines == "wide":
        return Part(0, 1, NODE), Part(0, 2, NODE // 2), Part(0, 4, (nodes - 2) * NODE // 4)
    small = max(1, nodes // 3)
    return Part(0, 4, small * NODE // 4), Part(0, 8, nodes - small)


def seconds(job: Job) -> float:
    """Simulated seconds of one batch, per batch in steady state, or of a planner's run."""
    name, engines, mechanism, seed = job
    with without(mechanism):
        if name in PLANNER_ROWS:
            return _planned_s(name, seed)
        fleet = fleet_of(name, setting_of(name), engines)
        return fleets_search.seconds((name, Contestant(fleet, OURS, roles=Roles(train=1)), seed, math.inf, 0))


def _planned_s(name: str, seed: int) -> float:
    is_tiers = name == "repartition"
    site = FEW if is_tiers else SITE
    rule = Tiers(SLOW_LOOK, site) if is_tiers else Live(SLOW_LOOK, site)
    work = named_work("curriculum" if is_tiers else name, STEPS, seed)
    return play(site, work, rule=rule, train=site.nodes // 2, seed=seed).seconds


# --- all of them

Logs = dict[tuple[Case, str], list[float]]
"""By case and mechanism: 100 log (off / on) of every seed."""


def add_seed(logs: Logs, pool: Executor, case: Case, seed: int) -> None:
    """Run one seed of a case; what decided alike on `SAME_AFTER` seeds is not run again."""
    off = [one for (of, one), found in logs.items() if of == case and (len(found) < SAME_AFTER or any(found))]
    with_all, *without_one = pool.map(seconds, [(*case, mechanism, seed) for mechanism in ("", *off)])
    for mechanism, took in zip(off, without_one, strict=True):
        logs[case, mechanism].append(100.0 * math.log(took / with_all))


def cell_of(found: Sequence[float]) -> Cell:
    error = statistics.stdev(found) / len(found) ** 0.5 if len(found) > 1 else math.inf
    return Cell(statistics.fmean(found), error, len(found))


def cases_of(given: Options) -> list[Case]:
    """(row, engines) of the chosen rows; the planner's rows have no engines."""
    if given.part == "planner":
        return [(row, "") for row in given.rows]
    found = [(row, fleet) for row in given.rows for fleet in SCHEDULER_ROWS.get(row, (BOTH, 1))[0]]
    return [case for case in found if given.engines in ("all", case[1])]


def lines(logs: Logs) -> list[list[str]]:
    """Mean, best and worst row of every mechanism, the most useful first."""
    found = []
    for mechanism in dict.fromkeys(name for _, name in logs):
        cells = {case: cell_of(values) for (case, name), values in logs.items() if name == mechanism}
        ends = [pick(cells, key=lambda case: cells[case].mean) for pick in (max, min)]
        words = [text for case in ends for text in (_words(cells[case]), _label(case))]
        found.append((statistics.fmean(cell.mean for cell in cells.values()), mechanism, words))
    return [[mechanism, f"{mean:+.1f}", *words] for mean, mechanism, words in sorted(found, key=lambda line: -line[0])]


def _words(cell: Cell) -> str:
    return f"{cell.mean:+.1f} ±{cell.error:.1f}" if cell.seeds > 1 else f"{cell.mean:+.1f}"


def _label(case: Case) -> str:
    return f"{trace_name(case[0])}, {case[1]}".removesuffix(", ")


def chosen() -> Options:
    every = dict.fromkeys((*SCHEDULER_ROWS, *PLANNER_ROWS))
    defaults: dict[str, Any] = {"part": ("scheduler", "planner"), "engines": ("all", *ALL), "only": "", "trace": True}
    defaults |= {"seeds": 4, "first_seed": 0, "jobs": 1}
    given = options("ablation", __doc__, rows=every, quick=QUICK, **defaults)
    mechanisms, rows = (SCHEDULER, SCHEDULER_ROWS) if given.part == "scheduler" else (PLANNER, PLANNER_ROWS)
    given.only = names(given, "--only", given.only, mechanisms, mechanisms)
    valid = [*rows, *given.trace]
    if given.rows == list(every):
        given.rows = list(rows)
    given.rows = names(given, "--rows", "|".join(given.rows), valid, valid)
    given.seeds = min(2, given.seeds) if given.quick else given.seeds
    if not cases_of(given):
        given.error(f"--engines: no row of {', '.join(given.rows)} has {given.engines!r}")
    return given


def main() -> None:
    given = chosen()
    cases, begin = cases_of(given), time.perf_counter()
    one = given.quick or given.part == "planner"
    times = {case: 1 if one else SCHEDULER_ROWS.get(case[0], (BOTH, 1))[1] for case in cases}
    logs: Logs = {(case, mechanism): [] for case in cases for mechanism in given.only}
    # Started anew, so that they import the sources.
    os.environ[compiled.INTERPRETED] = "1"
    with ProcessPoolExecutor(given.jobs, multiprocessing.get_context("spawn")) as pool:
        for number in range(given.seeds * max(times.values())):
            for case in [case for case in cases if number < given.seeds * times[case]]:
                add_seed(logs, pool, case, given.first_seed + number)
                progress(f"seed {given.first_seed + number}: {_label(case)} ({time.perf_counter() - begin:.0f} s)")
                write(given, raw(logs))
    notes = ["100 log (seconds off / on), mean ±standard error; above 0: it earns"]
    title = f"What each mechanism of the {given.part} earns"
    report(given, title, columns=COLUMNS, rows=lines(logs), notes=notes, raw=raw(logs))


def raw(logs: Logs) -> list[dict[str, Any]]:
    """Those that have run."""
    return [
        {"row": _label(case), "off": name, **cell_of(found)._asdict(), "logs": found}
        for (case, name), found in logs.items()
        if found
    ]


if __name__ == "__main__":
    main()
