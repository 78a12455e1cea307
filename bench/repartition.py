"""Repartitions in the simulator: 48 A800 in 12 nodes, of which two are hybrid.

The workloads of `bench.replan` with Qwen3-8B, whose training fits a node of 4. Five nodes only train, five only roll
out. Four ways to run them:

- the best static split in hindsight;
- the live planner with its first tier, the two hybrid nodes;
- the live planner with both tiers;
- the first tier alone with all nodes hybrid but one at either end.

A restart takes 240 s after the step boundary and loses unfinished trajectories. The last line is the case without
drift.

    python -m bench.repartition [--seeds 3] [--steps 120] [--rows NAME|NAME] [--idle-steps 400] [--jobs 2]
"""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from bench.harness import cells, options, report
from bench.replan import Found, Job, named_work, play_all, statics
from bench.replan_pool import Site
from bench.replan_rules import SETTINGS, Live, Played, Rule, Tiers, play
from bench.replan_work import WORKLOADS

FEW = Site(core=(5, 5), model="qwen3-8b", token_s=16 * 0.5e-4)
"""``token_s``: 8.2e9 weights, 6 FLOPs each at half the peak of 4 A800, for 60 % of the groups; sixteen tokens."""
ALL = replace(FEW, core=(1, 1))
MIDDLE = FEW.nodes // 2
MINUTELY = SETTINGS.model_copy(update={"interval_s": 60.0})
"""A third of the evaluations of `bench.replan`."""
COLUMNS = {
    "x 1st": "{first:.3f}",
    "range": "{first_min:.2f}..{first_max:.2f}",
    "x static": "{static:.3f}",
    "1st/static": "{first_static:.3f}",
    "x all hyb.": "{every:.3f}",
    "starts": "{starts:.1f}",
    "lost": "{lost:.1%}",
    "moves": "{moves:.1f}",
}


def compare(job: Job) -> Found:
    """All ways on one workload and seed."""
    name, seed, steps = job
    work = named_work(name, steps, seed)

    def run(rule: Rule, train: int, site: Site = FEW) -> Played:
        return play(site, work, rule=rule, train=train, seed=seed)

    fixed = statics(lambda rule, train: run(rule, train, ALL))
    best = min(fixed, key=lambda n: fixed[n].seconds)
    one, both = run(Live(MINUTELY, FEW), MIDDLE), run(Tiers(MINUTELY, FEW), MIDDLE)
    every = run(Live(MINUTELY, ALL), MIDDLE, ALL)
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


def idle(job: Job) -> Found:
    """No drift, from an even split."""
    _, seed, steps = job
    done = play(FEW, named_work("steady", steps, seed), rule=Tiers(MINUTELY, FEW), train=MIDDLE, seed=seed)
    return {"words": f"{len(done.repartitioned)} restarts and {done.moves} moves in {steps} steps, from an even split"}


def main() -> None:
    """Command line."""
    defaults: dict[str, Any] = {"seeds": 3, "first_seed": 0, "steps": 120, "idle_steps": 400, "jobs": 2}
    given = options("repartition", __doc__, rows=WORKLOADS, quick=("curriculum",), **defaults)
    counts = "static {static:.3f}, first {first:.3f}, every {every:.3f}, {starts} restarts, {moves} moves"
    found, notes = play_all(given, compare, idle=idle, counts=counts)
    notes.append("lost: time in which nothing ran; 1st/static: what the first tier brings with two hybrid nodes")
    rows = [[name, *cells(COLUMNS, results)] for name, results in found.items()]
    title = "Both tiers of the planner against the simulator"
    report(given, title, columns=["work", *COLUMNS], rows=rows, notes=notes, raw=found)


if __name__ == "__main__":
    main()
