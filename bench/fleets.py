"""The judge: what libra-hpc would choose, against the best that a user could have chosen, in the simulator.

- Ours: the planner's fleet for lengths seen before, chosen as `libra-hpc plan` does, and `cmlfq` with its defaults.
- The opponent: the best, in hindsight and at equal GPUs, of all homogeneous fleets and the common mixes, of six tuned
  rules and eight rules of admission (`bench.fleets_search`).  Chosen on some seeds, reported on others.
- ``x``: the opponent's seconds over ours; above 1 ours is faster.  ``bound``: a lower bound over ours.
- ``plan``: seconds of a batch by the cost models over those of the simulator, for the planner's fleet and the choosing
  seeds, whose lengths the cost models know.

Elastic control is not judged here: training has nodes of its own (`bench.replan`).

    python -m bench.fleets [--rows NAME|NAME] [--trace FILE ...] [--seeds 3] [--quick] [--json FILE]
        [--jobs 2]
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from typing import Any

from msgspec.structs import replace

from bench.fleets_rows import (
    NODE,
    ROWS,
    Proposal,
    bounds,
    fleet_name,
    fleets_of,
    longest_context,
    proposals,
    setting_of,
    trace_name,
    work,
)
from bench.fleets_search import OURS, Contestant, Effort, Search
from bench.harness import options, progress, report, write
from libra_hpc.planning.simulated_plan import halving, promising

CHOOSING = 1_000
"""First seed for choosing; those for reporting start at 0."""
QUICK_ROWS = ("r2e", "math", "long")
QUICK = {"pairs": 3, "tuned": 2, "finalists": 2, "reported": 1}
"""Effort of ``--quick``, with one seed for choosing, one for reporting, and smaller rows."""
COLUMNS = ("row", "ours", "ours, s", "the best other choice", "s", "x", "bound", "plan")


def judge(pool: Executor, name: str, effort: Effort) -> dict[str, Any]:
    begin = time.perf_counter()

    def say(text: str) -> None:
        progress(f"{label}: {text} ({time.perf_counter() - begin:.0f} s)")

    label = trace_name(name)
    row, first = setting_of(name), effort.choosing[0]
    seen = [one for seed in effort.choosing for one in work(name, seed)[1]]
    every = [one for seed in (*effort.choosing, *effort.reporting) for one in work(name, seed)[1]]
    longest = longest_context(name, every)
    search = Search(pool, name, effort, say)
    choice = planned(search, proposals(row, seen, longest), effort)
    ranked = search.opponents(fleets_of(row, longest))
    ours = Contestant(choice.fleet, OURS)
    bare = next((c for c in ranked if not c.admission), ranked[0]._replace(admission=""))
    search.run([*ranked[: effort.reported], ours, bare], effort.reporting, limited=False)
    opponent = min(ranked[: effort.reported], key=lambda c: search.median(c, effort.reporting))
    shown = {"ours": ours, "opponent, no admission": bare, "opponent": opponent}
    bound = {seed: bounds(row, work(name, seed)[1], longest) for seed in effort.reporting}
    found = {
        key: {
            "fleet": fleet_name(row, c.fleet),
            "policy": c.words,
            "seconds": [search.of(c, seed) for seed in effort.reporting],
            "x": statistics.median(search.of(opponent, s) / search.of(c, s) for s in effort.reporting),
            "bound": statistics.median(max(bound[s].values()) / search.of(c, s) for s in effort.reporting),
        }
        for key, c in shown.items()
    }
    say(f"{search.count} simulations, ours {found['ours']['x']:.2f} x as fast as {found['opponent']['policy']}")
    simulated = statistics.fmean(search.of(ours, seed) for seed in effort.reporting)
    return {
        "row": label,
        "setting": row._asdict(),
        "plan": {"model_s": choice.model_s, "expected_s": choice.seconds, "simulated_s": simulated},
        "choosing": [first, len(effort.choosing)],
        "found": found,
        "bounds": bound,
        "simulations": search.count,
        "took_s": time.perf_counter() - begin,
    }


def planned(search: Search, options: Sequence[Proposal], effort: Effort) -> Proposal:
    """The planner's choice, as `libra-hpc plan` makes it: the promising ones, simulated on the choosing seeds."""

    def play(option: Proposal, seed: int) -> float:
        contestant = Contestant(option.fleet, OURS)
        search.run([contestant], [effort.choosing[seed]], limited=False)
        return search.of(contestant, effort.choosing[seed])

    def with_seconds(option: Proposal, seconds: float, batches: int) -> Proposal:
        return replace(option, seconds=seconds, simulated=batches)

    return halving(promising(options, len(options)), play, with_seconds, seeds=len(effort.choosing))[0]


def line(row: dict[str, Any]) -> tuple[str, ...]:
    mine, other, plan = row["found"]["ours"], row["found"]["opponent"], row["plan"]
    took = [f"{statistics.median(one['seconds']):,.0f}" for one in (mine, other)]
    ratios = (f"{mine['x']:.2f}", f"{mine['bound']:.0%}", f"{plan['model_s'] / plan['expected_s']:.2f}")
    return (row["row"], mine["fleet"], took[0], f"{other['fleet']}; {other['policy']}", took[1], *ratios)


def shrink(names: Sequence[str]) -> None:
    """Change the rows: a quarter of the trajectories on half of the GPUs."""
    for name in set(names) & set(ROWS):
        row = ROWS[name]
        pools = tuple((device, max(NODE, count // (2 * NODE) * NODE)) for device, count in row.pools)
        ROWS[name] = row._replace(trajectories=max(64, row.trajectories // 4), pools=pools)


def main() -> None:
    given = options("fleets", __doc__, rows=ROWS, quick=QUICK_ROWS, trace=True, seeds=3, jobs=2)
    count = 1 if given.quick else given.seeds
    effort = Effort(tuple(range(CHOOSING, CHOOSING + count)), tuple(range(count)), **(QUICK if given.quick else {}))
    if given.quick:
        shrink(given.rows)
    begin, done = time.perf_counter(), list[dict[str, Any]]()
    # The workers are forked after the rows were changed.
    with ProcessPoolExecutor(given.jobs) as pool:
        for name in given.rows:
            done.append(judge(pool, name, effort))
            write(given, done)
    better = [row["found"]["ours"]["x"] for row in done]
    x = f"geometric mean {math.exp(statistics.fmean(math.log(x) for x in better)):.2f}, worst {min(better):.2f}"
    minutes = (time.perf_counter() - begin) / 60
    notes = [f"{len(done)} rows in {minutes:.0f} minutes; x: {x}; details: {given.json}"]
    rows = [line(row) for row in done]
    report(given, "Ours and the best other choice", columns=COLUMNS, rows=rows, notes=notes, raw=done)


if __name__ == "__main__":
    main()
