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

import argparse
import json
import math
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table

from bench import fleets_rows, policies
from bench.ablation_parts import PLANNER, SCHEDULER, without
from bench.fleets_rows import NODE, Fleet, Part, Setting, engines_of, longest_context, settings_of
from bench.harness import RESULTS, machine
from bench.repartition import FEW
from bench.replan import SITE
from bench.replan_rules import SETTINGS, Live, play
from bench.replan_tiers import Tiers
from bench.replan_work import WORKLOADS, drifting, steady
from libra_hpc import compiled
from libra_hpc.policies.scheduling.cmlfq.causal_mlfq import CausalMlfq
from libra_hpc.protocol.trace import TrajectoryRecord
from libra_hpc.simulator.simulate import Simulation, simulate

EVEN_TP = {"documents": 4, "long": 2}
"""Degrees that the search with ``sorted_lengths=False`` chooses for these rows; 8 for the others."""
EPOCH = ", third epoch"
"""Rows of `bench.scheduling` whose prompts have been seen twice before."""
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

Job = tuple[str, str, str, int]
"""(row, engines, mechanism, seed); the mechanism is empty where all is on."""


class Cell(NamedTuple):
    """What a mechanism earns on one row, in 100 log units."""

    mean: float
    error: float
    seeds: int


# --- one simulation


@lru_cache(maxsize=4)
def work(name: str, seed: int) -> tuple[Setting, list[list[TrajectoryRecord]], list[TrajectoryRecord]]:
    """(setting, batches that came before, the work)."""
    if not name.endswith(EPOCH):
        row = fleets_rows.setting_of(name)
        before, found = fleets_rows.work(name, seed)
        return row, [before] if before else [], found
    row = Setting()
    found = policies.work_of(name, seed, row.trajectories)
    *epochs, last = [found[i : i + row.trajectories] for i in range(0, len(found), row.trajectories)]
    return row, epochs, last


def fleet_of(name: str, row: Setting, engines: str) -> Fleet:
    """Engines of the row's GPUs: a third of the nodes in the smaller degrees, or all of one degree."""
    gpus = row.pools[0][1]
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
        return _planned_s(name, seed) if name in PLANNER_ROWS else _scheduled_s(name, engines, seed)


def _scheduled_s(name: str, engines: str, seed: int) -> float:
    row, before, found = work(name, seed)
    longest = policies.MAX_CONTEXT if name.endswith(EPOCH) else longest_context(name, found)
    settings, specs, policy = settings_of(row, longest), engines_of(row, fleet_of(name, row, engines)), CausalMlfq()
    for batch in before:
        simulate(batch, specs, policy, settings)
    result = Simulation(found, specs, policy, settings).run()
    if not row.batches:
        return result.makespan_s
    last = row.batches - 1 - row.eta
    return (result.steps[last].batch_at - result.steps[0].batch_at) / last


def _planned_s(name: str, seed: int) -> float:
    site = FEW if name == "repartition" else SITE
    workload = WORKLOADS["curriculum"] if name == "repartition" else WORKLOADS.get(name, steady)
    made = drifting(workload, STEPS, groups=site.prompts, group=site.group, seed=seed)
    rule = Tiers(SLOW_LOOK, site) if name == "repartition" else Live(SLOW_LOOK, site)
    return play(site, made, rule=rule, train=site.nodes // 2, seed=seed).seconds


# --- all of them


class Ablation:
    """Runs seed by seed and holds the seconds of every job."""

    def __init__(self, pool: Executor, mechanisms: Sequence[str]) -> None:
        self._pool, self._mechanisms = pool, mechanisms
        self.found: dict[Job, float] = {}

    def run(self, case: tuple[str, str], seed: int) -> None:
        """One seed of one (row, engines)."""
        jobs = [
            (*case, mechanism, seed)
            for mechanism in ("", *self._mechanisms)
            if not mechanism or not self._is_same(case, mechanism)
        ]
        for job, took in zip(jobs, self._pool.map(seconds, jobs), strict=True):
            self.found[job] = took

    def logs(self, case: tuple[str, str], mechanism: str) -> list[float]:
        """100 log (off / on) of every seed."""
        return [
            100.0 * math.log(took / self.found[*case, "", seed])
            for (name, engines, off, seed), took in self.found.items()
            if (name, engines) == case and off == mechanism
        ]

    def cell(self, case: tuple[str, str], mechanism: str) -> Cell:
        logs = self.logs(case, mechanism)
        error = statistics.stdev(logs) / len(logs) ** 0.5 if len(logs) > 1 else math.inf
        return Cell(statistics.fmean(logs), error, len(logs))

    def _is_same(self, case: tuple[str, str], mechanism: str) -> bool:
        logs = self.logs(case, mechanism)
        return len(logs) >= SAME_AFTER and not any(logs)


def cases_of(rows: Sequence[str], engines: str) -> list[tuple[str, str]]:
    """(row, engines) of these rows."""
    found = [(row, fleet) for row in rows for fleet in SCHEDULER_ROWS.get(row, (BOTH, 1))[0]]
    return [case for case in found if engines in ("", case[1])]


def table(done: Ablation, cases: Sequence[tuple[str, str]], mechanisms: Sequence[str]) -> Table:
    """Mean, best and worst row of every mechanism, the most useful first."""
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for column, side in (("off", "left"), ("mean", "right"), ("earns most", "left"), ("costs most", "left")):
        made.add_column(column, justify=side, no_wrap=column == "mean")  # type: ignore[arg-type]
    lines = []
    for mechanism in mechanisms:
        cells = {case: done.cell(case, mechanism) for case in cases}
        most, least = (pick(cells, key=lambda case: cells[case].mean) for pick in (max, min))
        lines.append((statistics.fmean(c.mean for c in cells.values()), mechanism, cells, most, least))
    for mean, mechanism, cells, most, least in sorted(lines, key=lambda line: -line[0]):
        made.add_row(mechanism, f"{mean:+.1f}", *(f"{_words(cells[case])} {_label(case)}" for case in (most, least)))
    return made


def _words(cell: Cell) -> str:
    return f"{cell.mean:+.1f} ±{cell.error:.1f}" if cell.seeds > 1 else f"{cell.mean:+.1f}"


def _label(case: tuple[str, str]) -> str:
    name = fleets_rows.trace_name(case[0]) if case[0].endswith(".gz") else case[0]
    return f"{name}, {case[1]}".removesuffix(", ")


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--part", choices=("scheduler", "planner"), default="scheduler")
    parser.add_argument("--rows", default="", help=f"separated by |, of: {', '.join((*SCHEDULER_ROWS, *PLANNER_ROWS))}")
    parser.add_argument("--engines", choices=ALL, default="", help="those of every row that has them")
    parser.add_argument("--only", default="", help="mechanisms, separated by |")
    parser.add_argument("--trace", action="append", default=[], help="a recorded trace, one more row")
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help=f"two seeds of {', '.join(QUICK)}")
    parser.add_argument("--json", type=Path, default=RESULTS / "ablation.json")
    parser.add_argument("--jobs", type=int, default=1)
    given = parser.parse_args()
    parts, rows = (SCHEDULER, SCHEDULER_ROWS) if given.part == "scheduler" else (PLANNER, PLANNER_ROWS)
    given.rows = [n for n in given.rows.split("|") if n] or [*(QUICK if given.quick else rows), *given.trace]
    given.only = [n for n in given.only.split("|") if n] or list(parts)
    for flag, names, valid in (("--rows", given.rows, [*rows, *given.trace]), ("--only", given.only, parts)):
        for name in names:
            if name not in valid:
                parser.error(f"{flag}: {name!r} is unknown; valid for this part: {', '.join(valid)}")
    for path in given.trace:
        if not Path(path).is_file():
            parser.error(f"--trace: {path} is no file")
    if given.part == "scheduler" and not cases_of(given.rows, given.engines):
        parser.error(f"--engines: no row of {', '.join(given.rows)} has {given.engines!r}")
    if given.seeds < 1:
        parser.error("--seeds must be at least 1")
    if given.quick:
        given.seeds = min(2, given.seeds)
    return given


def main() -> None:
    """Run and print."""
    given = options()
    is_planner = given.part == "planner"
    cases = [(row, "") for row in given.rows] if is_planner else cases_of(given.rows, given.engines)
    begin = time.perf_counter()
    # Started anew, so that they import the sources.
    os.environ[compiled.INTERPRETED] = "1"
    with ProcessPoolExecutor(given.jobs, multiprocessing.get_context("spawn")) as pool:
        done = Ablation(pool, given.only)
        times = {case: 1 if given.quick or is_planner else SCHEDULER_ROWS.get(case[0], (BOTH, 1))[1] for case in cases}
        for number in range(given.seeds * max(times.values())):
            seed = given.first_seed + number
            for case in cases:
                if number < given.seeds * times[case]:
                    done.run(case, seed)
                    took_s = time.perf_counter() - begin
                    print(f"seed {seed}: {_label(case)} ({took_s:.0f} s)", file=sys.stderr, flush=True)
                    _write(given, done, cases, took_s)
    console = Console(width=80 if not sys.stdout.isatty() else None)
    console.print(table(done, cases, given.only), highlight=False)
    console.print("100 log (seconds off / on), mean ±standard error; above 0: it earns", highlight=False)


def _write(given: argparse.Namespace, done: Ablation, cases: Sequence[tuple[str, str]], took_s: float) -> None:
    cells: list[dict[str, Any]] = [
        {"row": _label(case), "off": name, **done.cell(case, name)._asdict(), "logs": done.logs(case, name)}
        for case in cases
        for name in given.only
        if done.logs(case, name)
    ]
    given.json.parent.mkdir(parents=True, exist_ok=True)
    made = {"benchmark": "ablation", "part": given.part, "machine": machine(), "took_s": took_s, "cells": cells}
    given.json.write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
