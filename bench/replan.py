"""The live planner in the simulator: drifting workloads on 48 A800, against static splits, verl's rule, a clairvoyant.

Workloads that drift and workloads that jump for a while (`bench.replan_work`). Every rule gets the same trajectories
and pays for its moves. The planner starts from an even split.

- ``x static``: against the best static split in hindsight; ``from it``: the planner starts from that one.
- ``x verl``: against verl's rule, at the better of that number of training nodes and one more.
- ``x clairv.``: against the better of two schedules computed from the static runs.
- ``clairv./static``: what re-planning can bring at all; ``lost``: node time between order and work in the new role.

The last line is the case without drift.

    python -m bench.replan [--seeds 3] [--steps 120] [--rows NAME|NAME] [--idle-steps 1000] [--jobs 2] [--quick]
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from bench.harness import Options, by_row, cells, options, report, seeds
from bench.replan_pool import Site
from bench.replan_rules import SETTINGS, Live, Played, Rule, Static, VerlLike, clairvoyant, play
from bench.replan_work import JUMPS, SEGMENT, WORKLOADS, drifting, steady
from libra_hpc.protocol.trace import TrajectoryRecord

SITE = Site()
WORSE = 1.25
"""Static splits are tried outwards from the even one until two in a row take this much longer than the best."""
SWITCH_S = 60.0
"""Seconds of the loop that a change of split costs in the clairvoyant's plan: a node is away for some 75 s, a twelfth
to a third of a stage."""
QUICK = ("curriculum", "jump 10")
"""Rows of ``--quick``: one seed takes a minute of one core."""
COLUMNS = {
    "x static": "{static:.3f}",
    "least": "{static_min:.3f}",
    "from it": "{from_it:.3f}",
    "x verl": "{verl:.3f}",
    "x clairv.": "{clairvoyant:.3f}",
    "clairv./static": "{clairvoyant_static:.3f}",
    "moves": "{moves:.1f}",
    "lost": "{switching:.1%}",
}
Job = tuple[str, int, int]
"""(row, seed, steps)."""
Found = dict[str, Any]


def statics(run: Callable[[Rule, int], Played]) -> dict[int, Played]:
    """Static splits by number of training nodes."""
    middle = SITE.nodes // 2
    runs = {middle: run(Static(), middle)}
    for direction in (-1, 1):
        worse, train = 0, middle + direction
        while 1 <= train < SITE.nodes and worse < 2:
            runs[train] = run(Static(), train)
            worse = worse + 1 if runs[train].seconds > WORSE * min(r.seconds for r in runs.values()) else 0
            train += direction
    return runs


def named_work(name: str, steps: int, seed: int) -> list[TrajectoryRecord]:
    """A workload by name; that of a jump changes between two batches."""
    drift, segment = (JUMPS[name], 1) if name in JUMPS else ({**WORKLOADS, "steady": steady}[name], SEGMENT)
    return drifting(drift, steps, groups=SITE.prompts, group=SITE.group, seed=seed, segment=segment)


def compare(job: Job) -> Found:
    """All rules on one workload and seed."""
    name, seed, steps = job
    work = named_work(name, steps, seed)

    def run(rule: Rule, train: int) -> Played:
        return play(SITE, work, rule=rule, train=train, seed=seed)

    fixed = statics(run)
    best = min(fixed, key=lambda n: fixed[n].seconds)
    verl = min((run(VerlLike(), n) for n in (best, best + 1) if n < SITE.nodes), key=lambda p: p.seconds)
    ideal = clairvoyant(run, fixed, SWITCH_S)
    ours = run(Live(SETTINGS, SITE), SITE.nodes // 2)
    from_best = run(Live(SETTINGS, SITE), best)
    return {
        "best_split": best,
        "tokens_s": ours.tokens_s,
        "static": fixed[best].seconds / ours.seconds,
        "from_it": fixed[best].seconds / from_best.seconds,
        "even": fixed[SITE.nodes // 2].seconds / ours.seconds,
        "verl": verl.seconds / ours.seconds,
        "clairvoyant": ideal.seconds / ours.seconds,
        "clairvoyant_static": fixed[best].seconds / ideal.seconds,
        "moves": ours.moves,
        "switching": ours.switching_s / (SITE.nodes * ours.seconds),
        "seconds": ours.seconds,
        "decisions": [d.reason for d in ours.decisions],
        "outcomes": [(o.predicted, o.realised) for o in ours.outcomes],
    }


def idle(job: Job) -> Found:
    """No drift, from the best split: number of moves."""
    _, seed, steps = job
    probe = named_work("steady", 24, seed + 500)
    best = min(range(2, SITE.nodes - 1), key=lambda n: play(SITE, probe, rule=Static(), train=n, seed=seed).seconds)
    rule = Live(SETTINGS, SITE)
    done = play(SITE, named_work("steady", steps, seed), rule=rule, train=best, seed=seed)
    words = f"{done.moves} moves in {steps} steps ({done.seconds / 3600.0:.0f} h, {rule.evaluations} evaluations)"
    return {
        "words": f"{words}, {best} nodes train",
        "moves": done.moves,
        "decisions": [d.reason for d in rule.decisions],
    }


def play_all(
    given: Options, compare: Callable[[Job], Found], idle: Callable[[Job], Found], counts: str
) -> tuple[dict[str, list[Found]], list[str]]:
    """Run every workload and seed, and the case without drift unless ``--idle-steps`` is 0.

    Returns results by row, and notes. ``counts`` are words about a result.
    """
    if given.quick:
        given.seeds, given.steps, given.idle_steps = 1, 80, 0
    jobs = [(name, seed, given.steps) for name in given.rows for seed in seeds(given)]
    notes = [f"{given.seeds} seeds, {given.steps} steps, 12 nodes of 4 A800; throughput over that of the others"]
    with ProcessPoolExecutor(given.jobs) as pool:
        still = pool.submit(idle, ("", given.first_seed, given.idle_steps)) if given.idle_steps else None
        found = by_row(pool, compare, jobs, lambda result: counts.format(**result))
        if still:
            notes.append(f"no drift: {still.result()['words']}")
    return found, notes


def main() -> None:
    """Command line."""
    every = (*WORKLOADS, *JUMPS)
    given = options(
        "replan", __doc__, rows=every, quick=QUICK, seeds=3, first_seed=0, steps=120, idle_steps=1000, jobs=2
    )
    counts = "static {static:.3f}, from_it {from_it:.3f}, verl {verl:.3f}, clairvoyant {clairvoyant:.3f}, {moves} moves"
    found, notes = play_all(given, compare, idle=idle, counts=counts)
    every_seed = [row["static"] for rows in found.values() for row in rows]
    notes.append("goals: x static 1.15, x verl 1.10, x clairv. 0.95")
    notes.append(f"all rows: x static {statistics.fmean(every_seed):.3f}, least {min(every_seed):.3f}")
    rows = [[name, *cells(COLUMNS, results)] for name, results in found.items()]
    title = "The live planner against the simulator"
    report(given, title, columns=["work", *COLUMNS], rows=rows, notes=notes, raw=found)


if __name__ == "__main__":
    main()
