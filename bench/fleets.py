"""The judge: what libra-hpc would choose, against the best that a user could have chosen, in the simulator.

- Ours: the planner's choice for lengths seen before, as `libra-hpc plan` makes it, and `cmlfq` with its defaults.
- The opponent: at equal GPUs the best of all fleets, rules and limits of `bench.fleets_search`; of a steady row
  also of all numbers of training nodes, and of all nodes in turn (colocation).  Chosen on three seeds.
- ``x``: the opponent's seconds over ours, geometric mean over five other seeds, two standard errors below and above.
- ``split``, ``turn``: seconds of the best opponent of each kind; in turn a pair of switches takes 80 s.
- ``plan``: seconds of a batch as `plan` prints them, over those simulated with the choosing seeds, whose lengths the
  planner knows.

    python -m bench.fleets [--rows NAME|NAME] [--seeds 5] [--quick] [--json FILE] [--jobs 2]

The JSON file is written after each row.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from typing import Any

from bench.fleets_rows import NODE, ROWS, Fleet, fleet_name, homogeneous, less_nodes
from bench.fleets_search import CHOOSING, OURS, Contestant, Effort, Search
from bench.fleets_training import Planned, Roles, planned_split
from bench.harness import options, progress, report, write

QUICK_ROWS = ("r2e", "math", "63k, eta 0")
QUICK = {"pairs": 2, "finalists": 2, "screen": 3}
"""Effort of ``--quick``, with one seed for choosing, two for reporting, and smaller rows."""
COLUMNS = ("row", "ours", "s", "the best other choice", "s", "x", "split", "turn", "plan")


def judge(pool: Executor, name: str, effort: Effort) -> dict[str, Any]:
    begin = time.perf_counter()

    def say(text: str) -> None:
        progress(f"{name}: {text} ({time.perf_counter() - begin:.0f} s)")

    row, search = ROWS[name], Search(pool, name, effort, say)
    if row.batches:
        choice = pool.submit(planned_split, name, effort.choosing, OURS).result()
    else:
        choice = planned(search, homogeneous(row), effort)
    ours = Contestant(choice.fleet, OURS, roles=choice.roles)
    search.run([ours], effort.choosing, limited=False)
    say(f"planned {_who(name, ours)}")
    ranked = search.opponents()
    shown = {"ours": ours, "opponent": ranked[0]}
    if row.batches:
        shown["split"] = next(c for c in ranked if c.roles.train)
        shown["turn"] = next(c for c in ranked if not c.roles.train)
    search.run(shown.values(), effort.reporting, limited=False)
    taken = {key: [search.of(c, seed) for seed in effort.reporting] for key, c in shown.items()}
    simulated = statistics.fmean(search.of(ours, seed) for seed in effort.choosing)
    result: dict[str, Any] = {
        "row": name,
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
    row = ROWS[name]
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
    found = row["found"]
    means = {key: f"{statistics.fmean(one['seconds']):,.0f}" for key, one in found.items()}
    who = (found["ours"]["who"], means["ours"], found["opponent"]["who"], means["opponent"])
    x = "{:.2f} ({:.2f}..{:.2f})".format(*row["x"])
    plan = f"{row['plan']['expected_s'] / row['plan']['simulated_s']:.2f}"
    return (row["row"], *who, x, means.get("split", ""), means.get("turn", ""), plan)


def shrink(names: Sequence[str]) -> None:
    """Change the rows: a quarter of the trajectories on half of the GPUs, half of the batches."""
    for name in names:
        row = ROWS[name]
        least = NODE * (1 + (row.batches > 0))
        pools = tuple((device, max(least, count // (2 * NODE) * NODE)) for device, count in row.pools)
        ROWS[name] = row._replace(trajectories=max(64, row.trajectories // 4), pools=pools, batches=row.batches // 2)


def main() -> None:
    given = options("fleets", __doc__, rows=ROWS, quick=QUICK_ROWS, seeds=5, jobs=2)
    count = min(given.seeds, 2) if given.quick else given.seeds
    if count < 2:
        given.error("--seeds must be at least 2, for an error of the ratios")
    choosing = CHOOSING[:1] if given.quick else CHOOSING
    effort = Effort(choosing, tuple(range(count)), **(QUICK if given.quick else {}))
    if given.quick:
        shrink(given.rows)
    begin, done = time.perf_counter(), list[dict[str, Any]]()
    # The processes are forked after the rows were changed.
    with ProcessPoolExecutor(given.jobs) as pool:
        for name in given.rows:
            done.append(judge(pool, name, effort))
            write(given, done)
    better = [row["x"][0] for row in done]
    x = f"geometric mean {math.exp(statistics.fmean(math.log(x) for x in better)):.2f}, worst {min(better):.2f}"
    minutes = (time.perf_counter() - begin) / 60
    notes = [f"{len(done)} rows in {minutes:.0f} minutes; x: {x}; details: {given.json}"]
    title = "Seconds of a batch, ours and the best other choice"
    report(given, title, columns=COLUMNS, rows=[line(row) for row in done], notes=notes, raw=done, width=160)


if __name__ == "__main__":
    main()
