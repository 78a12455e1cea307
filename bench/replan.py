"""The live planner in the simulator: drifting workloads on 48 A800, against static splits, verl's rule and a
clairvoyant.

Workloads that drift and workloads that jump for a while (`bench.replan_work`). Every rule gets the same trajectories
and pays for its moves. The planner starts from an even split.

- ``x static``: against the best static split in hindsight; ``from it``: the planner starts from that one.
- ``x verl``: against verl's rule, at the better of that number of training nodes and one more.
- ``x clairvoyant``: against the better of two schedules computed from the static runs.

The last line is the case without drift.

    python -m bench.replan [--seeds 3] [--steps 120] [--work NAME|NAME] [--idle-steps 1000] [--jobs 2] [--quick]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from bench.harness import by_work, report
from bench.replan_pool import Site
from bench.replan_rules import SETTINGS, Live, Played, Rule, Static, clairvoyant, play
from bench.replan_verl import VerlLike
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
Job = tuple[str, int, int]


def statics(run: Any) -> dict[int, Played]:
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
    drift, segment = (JUMPS[name], 1) if name in JUMPS else (WORKLOADS[name], SEGMENT)
    return drifting(drift, steps, groups=SITE.prompts, group=SITE.group, seed=seed, segment=segment)


def compare(job: Job) -> dict[str, Any]:
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
        "clairvoyant_moves": ideal.moves,
        "switching": ours.switching_s / (SITE.nodes * ours.seconds),
        "seconds": ours.seconds,
        "decisions": [d.reason for d in ours.decisions],
        "outcomes": [(o.predicted, o.realised) for o in ours.outcomes],
    }


def idle(job: Job) -> dict[str, Any]:
    """No drift, from the best split: number of moves."""
    _, seed, steps = job
    probe = drifting(steady, 24, groups=SITE.prompts, group=SITE.group, seed=seed + 500)
    best = min(range(2, SITE.nodes - 1), key=lambda n: play(SITE, probe, rule=Static(), train=n, seed=seed).seconds)
    rule = Live(SETTINGS, SITE)
    done = play(
        SITE,
        drifting(steady, steps, groups=SITE.prompts, group=SITE.group, seed=seed),
        rule=rule,
        train=best,
        seed=seed,
    )
    return {
        "split": best,
        "steps": steps,
        "looks": rule.evaluations,
        "moves": done.moves,
        "hours": done.seconds / 3600.0,
        "decisions": [d.reason for d in done.decisions],
    }


def options_of(doc: str | None, seeds: int, idle_steps: int, work: Sequence[str] = ()) -> argparse.Namespace:
    """The command line of a benchmark on the drifting workloads."""
    parser = argparse.ArgumentParser(description=(doc or "").split("\n")[0])
    parser.add_argument("--seeds", type=int, default=seeds)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--work", default="|".join(work or WORKLOADS), help="names separated by |")
    parser.add_argument("--idle-steps", type=int, default=idle_steps)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="two rows of one seed with 80 steps")
    options = parser.parse_args()
    if options.quick:
        rows = "|".join(name for name in QUICK if name in (work or WORKLOADS))
        options.seeds, options.steps, options.idle_steps, options.work = 1, 80, 0, rows
    return options


def play_all(
    options: argparse.Namespace,
    compare: Callable[[Job], dict[str, Any]],
    idle: Callable[[Job], dict[str, Any]],
    columns: Sequence[str],
    counts: str,
) -> tuple[dict[str, list[dict[str, Any]]], dict[str, Any] | None]:
    """Run every workload and seed, and the case without drift unless ``--idle-steps`` is 0.

    Each row prints ``columns``, then ``counts`` filled in.
    """
    names = [name for name in options.work.split("|") if name]
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    jobs = [(name, seed, options.steps) for name in names for seed in seeds]
    with ProcessPoolExecutor(options.jobs) as pool:
        still = pool.submit(idle, ("", options.first_seed, options.idle_steps)) if options.idle_steps else None
        found = by_work(
            pool, compare, jobs, lambda row: ", ".join([*(f"{k} {row[k]:.3f}" for k in columns), counts.format(**row)])
        )
        return found, still.result() if still else None


def means(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Mean of every numeric column."""
    return {key: statistics.fmean(row[key] for row in rows) for key in rows[0] if isinstance(rows[0][key], int | float)}


def main() -> None:
    """Command line."""
    options = options_of(__doc__, seeds=3, idle_steps=1000, work=(*WORKLOADS, *JUMPS))
    columns = ("static", "from_it", "verl", "clairvoyant")
    found, quiet = play_all(options, compare, idle=idle, columns=columns, counts="{moves} moves")
    lines = []
    for name, rows in found.items():
        mean = means(rows)
        low = min(row["static"] for row in rows)
        lines.append(
            [
                name,
                f"{mean['static']:.3f}",
                f"{low:.3f}",
                f"{mean['from_it']:.3f}",
                f"{mean['verl']:.3f}",
                f"{mean['clairvoyant']:.3f}",
                f"{mean['clairvoyant_static']:.3f}",
                f"{mean['moves']:.1f}",
                f"{mean['switching']:.1%}",
            ]
        )
    notes = [
        f"{options.seeds} seeds, {options.steps} steps, 12 nodes of 4 A800; goals: x static 1.15, x verl 1.10, x"
        " clairvoyant 0.95"
    ]
    notes.append(
        "clairv. / static: what re-planning can bring at all; lost: node time between order and work in the new role"
    )
    if quiet:
        length = f"{quiet['steps']} steps ({quiet['hours']:.0f} h, {quiet['looks']} evaluations)"
        notes.append(f"no drift: {quiet['moves']} moves in {length}, {quiet['split']} nodes train")
    every = [row["static"] for rows in found.values() for row in rows]
    notes.append(f"all rows: x static {statistics.fmean(every):.3f}, least {min(every):.3f}")
    columns = ("work", "x static", "least", "from it", "x verl", "x clairv.", "clairv./static", "moves", "lost")
    report(
        "replan",
        "The live planner against the simulator",
        columns=columns,
        rows=lines,
        notes=notes,
        raw={"work": found, "no drift": quiet},
    )


if __name__ == "__main__":
    main()
