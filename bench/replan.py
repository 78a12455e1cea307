"""The live planner in the simulator: drifting workloads on 48 A800 in 12 nodes, against splits that stay.

    python -m bench.replan [--seeds 3] [--steps 120] [--rows NAME|NAME] [--jobs 2] [--quick]

Workloads drift (`bench.replan_work`). Every rule gets the same trajectories and pays for its moves. All nodes but one
at either end are hybrid, Qwen3-14B. The planner starts from an even split.

- ``x static``: throughput over that of the best static split in hindsight.
- ``x verl``: over verl's rule, at the better of that number of training nodes and one more.
- ``lost``: share of the nodes' time between order and work in the new role.
"""

from __future__ import annotations

import statistics
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from bench.harness import by_row, options, report, seeds, spread
from bench.replan_pool import Site
from bench.replan_rules import SETTINGS, Live, Played, Rule, Static, VerlLike, play
from bench.replan_work import WORKLOADS, drifting

SITE = Site()
MIDDLE = SITE.nodes // 2
WORSE = 1.25
"""Static splits are tried outwards from the even one until two in a row take this much longer than the best."""
QUICK = ("curriculum",)
"""Rows of ``--quick``: one seed takes a minute of one core."""
COLUMNS = {"x static": ("static", ".3f"), "x verl": ("verl", ".3f"), "moves": ("moves", ".0f"), "lost": ("lost", ".1%")}
"""Figure of a seed, and its format; medians and ranges are shown."""


def compare(job: tuple[str, int, int]) -> dict[str, Any]:
    """All rules on one workload and seed."""
    name, seed, steps = job
    work = drifting(WORKLOADS[name], steps, groups=SITE.prompts, group=SITE.group, seed=seed)

    def run(rule: Rule, train: int) -> Played:
        return play(SITE, work, rule=rule, train=train, seed=seed)

    fixed = {MIDDLE: run(Static(), MIDDLE).seconds}
    for direction in (-1, 1):
        worse, train = 0, MIDDLE + direction
        while 1 <= train < SITE.nodes and worse < 2:
            fixed[train] = run(Static(), train).seconds
            worse = worse + 1 if fixed[train] > WORSE * min(fixed.values()) else 0
            train += direction
    best = min(fixed, key=fixed.__getitem__)
    verl = min(run(VerlLike(), train).seconds for train in (best, best + 1) if train < SITE.nodes)
    ours = run(Live(SETTINGS, SITE), MIDDLE)
    return {
        "best_split": best,
        "static": fixed[best] / ours.seconds,
        "verl": verl / ours.seconds,
        "moves": ours.moves,
        "lost": ours.switching_s / (SITE.nodes * ours.seconds),
        "seconds": ours.seconds,
        "decisions": [decision.reason for decision in ours.decisions],
    }


def main() -> None:
    """Run every workload and seed."""
    defaults: dict[str, Any] = {"seeds": 3, "first_seed": 0, "steps": 120, "jobs": 2}
    given = options("replan", __doc__, rows=WORKLOADS, quick=QUICK, **defaults)
    if given.quick:
        given.seeds, given.steps = 1, 80
    jobs = [(name, seed, given.steps) for name in given.rows for seed in seeds(given)]
    words = "static {static:.3f}, verl {verl:.3f}, {moves} moves"
    with ProcessPoolExecutor(given.jobs) as pool:
        found = by_row(pool, compare, jobs, lambda result: words.format(**result))
    every_seed = [row["static"] for rows in found.values() for row in rows]
    notes = [
        f"{given.seeds} seeds, {given.steps} steps, 12 nodes of 4 A800; throughput over that of the others",
        f"all rows: x static {statistics.fmean(every_seed):.3f}, least {min(every_seed):.3f}",
    ]
    rows = [
        [name, *(spread([one[figure] for one in results], digits) for figure, digits in COLUMNS.values())]
        for name, results in found.items()
    ]
    title = "The live planner against the simulator"
    report(given, title, columns=["work", *COLUMNS], rows=rows, notes=notes, raw=found)


if __name__ == "__main__":
    main()
