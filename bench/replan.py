"""The live planner in the simulator: drifting workloads on 48 A800 in 12 nodes, against splits that stay.

    python -m bench.replan [--part moves|repartition] [--seeds 3] [--steps 120] [--rows NAME|NAME] [--jobs 2]
        [--quick]

Workloads drift (`bench.replan_work`). Every rule gets the same trajectories and pays for its moves.
The planner starts from an even split.

``moves``: all nodes but one at either end are hybrid, Qwen3-14B.

- ``x static``: against the best static split in hindsight; ``from it``: the planner starts from that one.
- ``x verl``: against verl's rule, at the better of that number of training nodes and one more.
- ``x clairv.``: against the better of two schedules computed from the static runs.
- ``clairv./static``: what re-planning can bring at all; ``lost``: node time between order and work in the new role.

``repartition``: two nodes are hybrid, five only train, five only roll out; Qwen3-8B, whose training fits a node of 4.
A restart takes 240 s after the step boundary and loses unfinished trajectories. The planner with both tiers

- ``x 1st``: against the first tier alone, which moves the two hybrid nodes; ``1st/static``: what that tier brings;
- ``x static``: against the best static split in hindsight;
- ``x all hyb.``: against the first tier with all nodes hybrid but one at either end.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from bench.harness import by_row, cells, options, report, seeds
from bench.replan_pool import Site
from bench.replan_rules import SETTINGS, Live, Played, Rule, Static, Tiers, VerlLike, clairvoyant, play
from bench.replan_work import WORKLOADS, drifting
from libra_hpc.protocol.trace import TrajectoryRecord

SITE = Site()
FEW = Site(core=(5, 5), model="qwen3-8b", token_s=16 * 0.5e-4)
"""``token_s``: 8.2e9 weights, 6 FLOPs each at half the peak of 4 A800, for 60 % of the groups; sixteen tokens."""
ALL = replace(FEW, core=(1, 1))
MIDDLE = SITE.nodes // 2
MINUTELY = msgspec.structs.replace(SETTINGS, interval_s=60.0)
"""A third of the evaluations, for repartitions."""
WORSE = 1.25
"""Static splits are tried outwards from the even one until two in a row take this much longer than the best."""
SWITCH_S = 60.0
"""Seconds of the loop that a change of split costs in the clairvoyant's plan: a node is away for some 75 s, a twelfth
to a third of a stage."""
QUICK = ("curriculum",)
"""Rows of ``--quick``: one seed takes a minute of one core."""
Job = tuple[str, int, int]
"""(row, seed, steps)."""
Found = dict[str, Any]


class Part(NamedTuple):
    title: str
    rows: tuple[str, ...]
    columns: dict[str, str]
    words: str
    """About the result of a seed."""
    note: str
    compare: Callable[[Job], Found]
    """All rules on one workload and seed."""


def named_work(name: str, steps: int, seed: int) -> list[TrajectoryRecord]:
    return drifting(WORKLOADS[name], steps, groups=SITE.prompts, group=SITE.group, seed=seed)


def statics(run: Callable[[Rule, int], Played]) -> tuple[dict[int, Played], int]:
    """Static splits by number of training nodes, and the best one."""
    runs = {MIDDLE: run(Static(), MIDDLE)}
    for direction in (-1, 1):
        worse, train = 0, MIDDLE + direction
        while 1 <= train < SITE.nodes and worse < 2:
            runs[train] = run(Static(), train)
            worse = worse + 1 if runs[train].seconds > WORSE * min(r.seconds for r in runs.values()) else 0
            train += direction
    return runs, min(runs, key=lambda n: runs[n].seconds)


def compare_moves(job: Job) -> Found:
    name, seed, steps = job
    work = named_work(name, steps, seed)

    def run(rule: Rule, train: int) -> Played:
        return play(SITE, work, rule=rule, train=train, seed=seed)

    fixed, best = statics(run)
    verl = min((run(VerlLike(), n) for n in (best, best + 1) if n < SITE.nodes), key=lambda p: p.seconds)
    ideal = clairvoyant(run, fixed, SWITCH_S)
    ours = run(Live(SETTINGS, SITE), MIDDLE)
    from_best = run(Live(SETTINGS, SITE), best)
    return {
        "best_split": best,
        "tokens_s": ours.tokens_s,
        "static": fixed[best].seconds / ours.seconds,
        "from_it": fixed[best].seconds / from_best.seconds,
        "even": fixed[MIDDLE].seconds / ours.seconds,
        "verl": verl.seconds / ours.seconds,
        "clairvoyant": ideal.seconds / ours.seconds,
        "clairvoyant_static": fixed[best].seconds / ideal.seconds,
        "moves": ours.moves,
        "switching": ours.switching_s / (SITE.nodes * ours.seconds),
        "seconds": ours.seconds,
        "decisions": [d.reason for d in ours.decisions],
    }


def compare_tiers(job: Job) -> Found:
    name, seed, steps = job
    work = named_work(name, steps, seed)

    def run(rule: Rule, train: int = MIDDLE, site: Site = FEW) -> Played:
        return play(site, work, rule=rule, train=train, seed=seed)

    fixed, best = statics(lambda rule, train: run(rule, train, ALL))
    one, both = run(Live(MINUTELY, FEW)), run(Tiers(MINUTELY, FEW))
    every = run(Live(MINUTELY, ALL), site=ALL)
    return {
        "best_split": best,
        "static": fixed[best].seconds / both.seconds,
        "first": one.seconds / both.seconds,
        "every": every.seconds / both.seconds,
        "first_static": fixed[best].seconds / one.seconds,
        "starts": len(both.repartitioned),
        "lost": FEW.restart_s * len(both.repartitioned) / both.seconds,
        "moves": both.moves,
        "seconds": both.seconds,
        "decisions": [d.reason for d in both.decisions],
    }


PARTS = {
    "moves": Part(
        title="The live planner against the simulator",
        rows=tuple(WORKLOADS),
        columns={
            "x static": "{static:.3f}",
            "least": "{static_min:.3f}",
            "from it": "{from_it:.3f}",
            "x verl": "{verl:.3f}",
            "x clairv.": "{clairvoyant:.3f}",
            "clairv./static": "{clairvoyant_static:.3f}",
            "moves": "{moves:.1f}",
            "lost": "{switching:.1%}",
        },
        words="static {static:.3f}, from it {from_it:.3f}, verl {verl:.3f}, clairv. {clairvoyant:.3f}, {moves} moves",
        note="goals: x static 1.15, x verl 1.10, x clairv. 0.95",
        compare=compare_moves,
    ),
    "repartition": Part(
        title="Both tiers of the planner against the simulator",
        rows=tuple(WORKLOADS),
        columns={
            "x 1st": "{first:.3f}",
            "range": "{first_min:.2f}..{first_max:.2f}",
            "x static": "{static:.3f}",
            "1st/static": "{first_static:.3f}",
            "x all hyb.": "{every:.3f}",
            "starts": "{starts:.1f}",
            "lost": "{lost:.1%}",
            "moves": "{moves:.1f}",
        },
        words="static {static:.3f}, first {first:.3f}, every {every:.3f}, {starts} restarts, {moves} moves",
        note="lost: time in which nothing ran",
        compare=compare_tiers,
    ),
}


def main() -> None:
    """Run every workload and seed."""
    defaults: dict[str, Any] = {"seeds": 3, "first_seed": 0, "steps": 120, "jobs": 2}
    every = PARTS["moves"].rows
    given = options("replan", __doc__, rows=every, quick=QUICK, part=tuple(PARTS), **defaults)
    part = PARTS[given.part]
    if given.quick:
        given.seeds, given.steps = 1, 80
    jobs = [(name, seed, given.steps) for name in given.rows if name in part.rows for seed in seeds(given)]
    if not jobs:
        given.error(f"--rows: part {given.part} has only {', '.join(part.rows)}")
    with ProcessPoolExecutor(given.jobs) as pool:
        found = by_row(pool, part.compare, jobs, lambda result: part.words.format(**result))
    every_seed = [row["static"] for rows in found.values() for row in rows]
    notes = [
        f"{given.seeds} seeds, {given.steps} steps, 12 nodes of 4 A800; throughput over that of the others",
        part.note,
        f"all rows: x static {statistics.fmean(every_seed):.3f}, least {min(every_seed):.3f}",
    ]
    rows = [[name, *cells(part.columns, results)] for name, results in found.items()]
    report(given, part.title, columns=["work", *part.columns], rows=rows, notes=notes, raw=found)


if __name__ == "__main__":
    main()
