"""The planner's second tier against the simulator: core nodes repartitioned, on 48 A800 of which two nodes are hybrid.

The drifting workloads of `bench.replan`, Qwen3-8B (whose training fits a node of 4), 12 nodes: five only train, five
only roll out, two are hybrid.  Four ways to run them: the best *static* split in hindsight; the live planner with its
*first tier*, the two hybrid nodes; with *both tiers*; and with the first tier alone but every node hybrid but one at
either end, which costs no new start and is what hybrid nodes are for where memory allows them.  A new start takes 240 s
after the step boundary and loses the trajectories that have not ended.  The last line is the case without drift.

    python -m bench.repartition [--seeds 3] [--first-seed 0] [--steps 120] [--work NAME|NAME] [--idle-steps 400] [--jobs
    2]
"""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from bench.harness import report
from bench.replan import Job, means, options_of, play_all, statics
from bench.replan_pool import Site
from bench.replan_rules import SETTINGS, Live, Played, Rule, play
from bench.replan_tiers import Tiers
from bench.replan_work import WORKLOADS, drifting, steady

FEW = Site(core=(5, 5), model="qwen3-8b", token_s=16 * 0.5e-4)
"""``token_s``: 8.2e9 weights, 6 FLOPs each at half the peak of 4 A800, for the 60 % of the groups that train;
sixteen tokens."""
ALL = replace(FEW, core=(1, 1))
MINUTELY = SETTINGS.model_copy(update={"interval_s": 60.0})
"""A third of the looks of `bench.replan`: a batch takes minutes, a new start is decided in ten."""


def compare(job: Job) -> dict[str, Any]:
    """All ways on one workload and seed."""
    name, seed, steps = job
    work = drifting(WORKLOADS[name], steps, FEW.prompts, FEW.group, seed)

    def run(rule: Rule, train: int, site: Site = FEW) -> Played:
        return play(site, work, rule, train, seed)

    fixed = statics(lambda rule, train: run(rule, train, ALL))
    best = min(fixed, key=lambda n: fixed[n].seconds)
    middle = FEW.nodes // 2
    one, both, every = (
        run(Live(MINUTELY, FEW), middle),
        run(Tiers(MINUTELY, FEW), middle),
        run(Live(MINUTELY, ALL), middle, ALL),
    )
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


def idle(job: Job) -> dict[str, Any]:
    """No drift, from an even split."""
    _, seed, steps = job
    done = play(FEW, drifting(steady, steps, FEW.prompts, FEW.group, seed), Tiers(MINUTELY, FEW), FEW.nodes // 2, seed)
    return {
        "steps": steps,
        "starts": len(done.repartitioned),
        "at": done.repartitioned,
        "moves": done.moves,
        "decisions": [d.reason for d in done.decisions],
    }


def main() -> None:
    """Command line."""
    options = options_of(__doc__, seeds=3, idle_steps=400)
    found, quiet = play_all(options, compare, idle, ("static", "first", "every"), "{starts} new starts, {moves} moves")
    lines = []
    for name, rows in found.items():
        mean = means(rows)
        low, high = (pick(row["first"] for row in rows) for pick in (min, max))
        lines.append(
            [
                name,
                f"{mean['first']:.3f}",
                f"{low:.2f}..{high:.2f}",
                f"{mean['static']:.3f}",
                f"{mean['first_static']:.3f}",
                f"{mean['every']:.3f}",
                f"{mean['starts']:.1f}",
                f"{mean['lost']:.1%}",
                f"{mean['moves']:.1f}",
            ]
        )
    notes = [
        f"{options.seeds} seeds, {options.steps} steps, 12 nodes of 4 A800; throughput of both tiers over that of the"
        " others"
    ]
    notes.append("lost: time in which nothing ran; 1st/static: what the first tier brings with two hybrid nodes")
    if quiet:
        notes.append(
            f"no drift, from an even split: {quiet['starts']} new starts and {quiet['moves']} moves in {quiet['steps']}"
            " steps"
        )
    columns = ("work", "x 1st", "range", "x static", "1st/static", "x all hyb.", "starts", "lost", "moves")
    report(
        "repartition",
        "Both tiers of the planner against the simulator",
        columns,
        lines,
        notes,
        {"work": found, "no drift": quiet},
    )


if __name__ == "__main__":
    main()
