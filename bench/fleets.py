"""The judge: what libra-hpc would choose, against the best that a user could have chosen, in the simulator.

- Ours: the planner's choice for lengths seen before, as `libra-hpc plan` makes it, and `cmlfq` with its defaults.
- The opponent: at equal GPUs the best of all fleets, rules and admissions of `bench.fleets_search`; of a steady row
  also of all numbers of training nodes, and of all nodes in turn (colocation).  Chosen on three seeds.
- ``x``: the opponent's seconds over ours, geometric mean over five other seeds, two standard errors below and above.
- ``split``, ``turn``: seconds of the best opponent of each kind; in turn a pair of switches takes 80 s.
- ``plan``: seconds of a batch as `plan` prints them, over those simulated with the choosing seeds, whose lengths the
  planner knows.

    python -m bench.fleets [--rows NAME|NAME] [--trace FILE ...] [--seeds 5] [--quick] [--json FILE]
        [--jobs 2] [--keep FILE]

``--keep``: simulations are kept in the file, and not repeated by the next call (`bench.fleets_pool`).  The JSON file is
written after each row.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench.fleets_pool import Calls
from bench.fleets_rows import (
    NODE,
    ROWS,
    Fleet,
    fleet_name,
    homogeneous,
    less_nodes,
    longest_context,
    setting_of,
    trace_name,
)
from bench.fleets_search import OURS, Contestant, Effort, Search
from bench.fleets_training import Planned, Roles, planned_split
from bench.harness import options, progress, report, show, write

CHOOSING = (1_000, 1_001, 1_002)
"""Seeds for choosing; those for reporting start at 0."""
AT_ONCE = 2
"""Rows that are judged at the same time: one leaves processes idle at the end of each of its stages."""
QUICK_ROWS = ("r2e", "math", "63k, eta 0")
QUICK = {"pairs": 4, "tuned": 2, "finalists": 2, "screen": 3}
"""Effort of ``--quick``, with one seed for choosing, two for reporting, and smaller rows."""
COLUMNS = ("row", "ours", "other", "x", "low", "high", "split", "turn", "plan")
WHO = ("row", "ours", "the best other choice")


def judge(pool: Executor, name: str, effort: Effort) -> dict[str, Any]:
    begin = time.perf_counter()

    def say(text: str) -> None:
        progress(f"{label}: {text} ({time.perf_counter() - begin:.0f} s)")

    label, row = trace_name(name), setting_of(name)
    longest = longest_context(name, (*effort.choosing, *effort.reporting))
    search = Search(pool, name, effort, say)
    if row.batches:
        choice = pool.submit(planned_split, name, effort.choosing, longest, OURS).result()
    else:
        choice = planned(search, homogeneous(row, longest), effort)
    ours = Contestant(choice.fleet, OURS, roles=choice.roles)
    search.run([ours], effort.choosing, limited=False)
    say(f"planned {_who(name, ours)}")
    ranked = search.opponents(longest)
    shown = {"ours": ours, "opponent": ranked[0]}
    if row.batches:
        shown["split"] = next(c for c in ranked if c.roles.train)
        shown["turn"] = next(c for c in ranked if not c.roles.train)
    search.run(shown.values(), effort.reporting, limited=False)
    taken = {key: [search.of(c, seed) for seed in effort.reporting] for key, c in shown.items()}
    simulated = statistics.fmean(search.of(ours, seed) for seed in effort.choosing)
    result: dict[str, Any] = {
        "row": label,
        "setting": row._asdict(),
        "plan": {"expected_s": choice.expected_s, "simulated_s": simulated},
        "seeds": [effort.choosing, effort.reporting],
        "found": {key: {"who": _who(name, c), "policy": c.words, "seconds": taken[key]} for key, c in shown.items()},
        "x": ratio(taken["opponent"], taken["ours"]),
        "simulations": search.count,
        "took_s": time.perf_counter() - begin,
    }
    say("x {:.2f}, {:.2f} to {:.2f}; {}".format(*result["x"], result["found"]["opponent"]["who"]))
    return result


def ratio(theirs: Sequence[float], ours: Sequence[float]) -> tuple[float, float, float]:
    """Geometric mean of the paired ratios, and two standard errors below and above it."""
    logs = [math.log(a / b) for a, b in zip(theirs, ours, strict=True)]
    mean, error = statistics.fmean(logs), statistics.stdev(logs) / math.sqrt(len(logs))
    return math.exp(mean), math.exp(mean - 2.0 * error), math.exp(mean + 2.0 * error)


def _who(name: str, one: Contestant) -> str:
    row = setting_of(name)
    roles = f"{one.roles.words}: " if row.batches else ""
    return f"{roles}{fleet_name(less_nodes(row, one.roles.train), one.fleet)}; {one.words}"


def planned(search: Search, fleets: Sequence[Fleet], effort: Effort) -> Planned:
    """The fastest fleet on the choosing seeds, as `libra-hpc plan` plays them."""
    options = [Contestant(fleet, OURS) for fleet in fleets]
    search.run(options, effort.choosing, limited=False)
    seconds, best = min(
        (statistics.fmean(search.of(one, seed) for seed in effort.choosing), index) for index, one in enumerate(options)
    )
    return Planned(fleets[best], Roles(), seconds)


def line(row: dict[str, Any]) -> tuple[str, ...]:
    means = {key: f"{statistics.fmean(one['seconds']):,.0f}" for key, one in row["found"].items()}
    error = f"{row['plan']['expected_s'] / row['plan']['simulated_s']:.2f}"
    kinds = (means.get(key, "") for key in ("split", "turn"))
    x = (f"{value:.2f}" for value in row["x"])
    return (row["row"], means["ours"], means["opponent"], *x, *kinds, error)


def shrink(names: Sequence[str]) -> None:
    """Change the rows: a quarter of the trajectories on half of the GPUs, half of the batches."""
    for name in set(names) & set(ROWS):
        row = ROWS[name]
        least = NODE * (1 + (row.batches > 0))
        pools = tuple((device, max(least, count // (2 * NODE) * NODE)) for device, count in row.pools)
        ROWS[name] = row._replace(trajectories=max(64, row.trajectories // 4), pools=pools, batches=row.batches // 2)


def main() -> None:
    defaults: dict[str, Any] = {"seeds": 5, "jobs": 2, "keep": ""}
    given = options("fleets", __doc__, rows=ROWS, quick=QUICK_ROWS, trace=True, **defaults)
    count = min(given.seeds, 2) if given.quick else given.seeds
    if count < 2:
        given.error("--seeds must be at least 2, for an error of the ratios")
    choosing = CHOOSING[:1] if given.quick else CHOOSING
    effort = Effort(choosing, tuple(range(count)), **(QUICK if given.quick else {}))
    if given.quick:
        shrink(given.rows)
    begin, done = time.perf_counter(), list[dict[str, Any]]()
    # The processes are forked after the rows were changed.
    with Calls(given.jobs, Path(given.keep) if given.keep else None) as calls, ThreadPoolExecutor(AT_ONCE) as threads:
        for row in threads.map(lambda name: judge(calls.row(name), name, effort), given.rows):
            done.append(row)
            write(given, done)
    better = [row["x"][0] for row in done]
    x = f"geometric mean {math.exp(statistics.fmean(math.log(x) for x in better)):.2f}, worst {min(better):.2f}"
    minutes = (time.perf_counter() - begin) / 60
    notes = [f"{len(done)} rows in {minutes:.0f} minutes; x: {x}; details: {given.json}"]
    who = [(r["row"], r["found"]["ours"]["who"], r["found"]["opponent"]["who"]) for r in done]
    show("Who", WHO, who, width=80)
    rows = [line(row) for row in done]
    report(
        given, "Seconds of a batch, ours and the best other choice", columns=COLUMNS, rows=rows, notes=notes, raw=done
    )


if __name__ == "__main__":
    main()
