"""Repartitions in the simulator: 48 A800 in 12 nodes, of which two are hybrid.

The workloads of `bench.replan` with Qwen3-8B, whose training fits a node of 4. Five nodes only train, five only roll
out. Four ways to run them:

- the best static split in hindsight;
- the live planner with its first tier, the two hybrid nodes;
- the live planner with both tiers;
- the first tier alone with all nodes hybrid but one at either end.

A restart takes 240 s after the step boundary and loses unfinished trajectories. The last line is the case without
drift.

    python -m bench.repartition [--seeds 3] [--steps 120] [--work NAME|NAME] [--idle-steps 400] [--jobs 2]
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
"""``token_s``: 8.2e9 weights, 6 FLOPs each at half the peak of 4 A800, for 60 % of the groups; sixteen tokens."""
ALL = replace(FEW, core=(1, 1))
MINUTELY = SETTINGS.model_copy(update={"interval_s": 60.0})
"""A third of the evaluations of `bench.replan`."""


def compare(job: Job) -> dict[str, Any]:
    """All ways on one workload and seed."""
    name, seed, steps = job
    work = drifting(WORKLOADS[name], steps, groups=FEW.prompts, group=FEW.group, seed=seed)

    def run(rule: Rule, train: int, site: Site = FEW) -> Played:
        return play(site, work, rule=rule, train=train, seed=seed)

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
    done = play(
        FEW,
        drifting(steady, steps, groups=FEW.prompts, group=FEW.group, seed=seed),
        rule=Tiers(MINUTELY, FEW),
        train=FEW.nodes // 2,
        seed=seed,
    )
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
    found, quiet = play_all(
        options, compare, idle=idle, columns=("static", "first", "every"), counts="{starts} restarts, {moves} moves"
    )
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
            f"no drift, from an even split: {quiet['starts']} restarts and {quiet['moves']} moves in {quiet['steps']}"
            " steps"
        )
    columns = ("work", "x 1st", "range", "x static", "1st/static", "x all hyb.", "starts", "lost", "moves")
    report(
        "repartition",
        "Both tiers of the planner against the simulator",
        columns=columns,
        rows=lines,
        notes=notes,
        raw={"work": found, "no drift": quiet},
    )


if __name__ == "__main__":
    main()
