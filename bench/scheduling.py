"""Every scheduling policy on the same simulated engines and work: makespan against the oracle and C-MLFQ.

- Work: presets of the generator (tool outcomes or siblings informative or not; long documents), one batch of 512
  trajectories without history; the same in the third epoch; and ``--trace`` files, sampled per seed.
- Engines: 48 A800 with Qwen3-14B, 12xTP1, 6xTP2, 6xTP4; step times are operator tables.
- All policies of a seed get the same trajectories.  Ratios are taken within a seed; their mean has a 95 % interval
  (Student's t over seeds).

    python -m bench.scheduling [--seeds 5] [--trajectories 512] [--work NAME,...] [--policy NAME,...] [--trace FILE ...]
    [--jobs 2]
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from bench.harness import by_work, report
from bench.policies import POLICIES
from libra_hpc.protocol.trace import TrajectoryRecord
from libra_hpc.simulator.compare import compare
from libra_hpc.simulator.engine.sim_engines import build_engines
from libra_hpc.simulator.settings import SimSettings
from libra_hpc.traces.generate import Dials, generate
from libra_hpc.traces.read import read_trace

GPUS, DEVICE, MODEL, BUCKETS = 48, "a800", "qwen3-14b", "4xTP1,2xTP2,2xTP4"
MAX_CONTEXT = Dials().max_context
"""Where the generator ends trajectories, as a run file would; for a recorded trace it is unknown."""
WORK: dict[str, tuple[str, dict[str, Any]]] = {
    "r2e, outcomes tell": ("r2e", {"outcome": 1.0}),
    "r2e, siblings alone tell": ("r2e", {"outcome": 0.0}),
    "r2e, nothing tells": ("r2e", {"outcome": 0.0, "sibling": 0.0}),
    "search, outcomes tell": ("search", {"outcome": 1.0}),
    "search, nothing tells": ("search", {"outcome": 0.0, "sibling": 0.0}),
    "math, siblings tell": ("math", {}),
    "math, nothing tells": ("math", {"sibling": 0.0}),
    "documents, siblings tell": ("documents", {}),
    "r2e, outcomes tell, third epoch": ("r2e", {"outcome": 1.0, "epochs": 3}),
    "r2e, siblings alone tell, third epoch": ("r2e", {"outcome": 0.0, "epochs": 3}),
    "search, outcomes tell, third epoch": ("search", {"outcome": 1.0, "epochs": 3}),
    "math, siblings tell, third epoch": ("math", {"epochs": 3}),
}
T_95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26}
"""Student's t for a two-sided 95 % interval, by number of seeds."""

Row = dict[str, dict[str, float]]


def work_of(name: str, seed: int, trajectories: int) -> list[TrajectoryRecord]:
    """The work of one seed: generated (all epochs), or groups drawn from a trace."""
    if name in WORK:
        preset, dials = WORK[name]
        return generate(preset, Dials(trajectories=trajectories * dials.get("epochs", 1), seed=seed, **dials))
    groups: dict[str, list[TrajectoryRecord]] = {}
    for spec in read_trace(Path(name)).trajectories:
        groups.setdefault(spec.prompt_id, []).append(spec)
    order = sorted(groups)
    random.Random(seed).shuffle(order)
    drawn: list[TrajectoryRecord] = []
    for prompt in order:
        if len(drawn) < trajectories:
            drawn += groups[prompt]
    return drawn


def play(job: tuple[str, int, int, list[str]]) -> Row:
    """All policies on the work of one seed; the last epoch counts."""
    name, seed, trajectories, policies = job
    built = build_engines(BUCKETS, GPUS, DEVICE, MODEL)
    work, settings = work_of(name, seed, trajectories), SimSettings()
    before: list[list[TrajectoryRecord]] = []
    if name in WORK:
        settings = SimSettings(max_model_len=MAX_CONTEXT)
        *before, work = [work[start : start + trajectories] for start in range(0, len(work), trajectories)]
    done = compare(work, built.engines, [POLICIES[name] for name in policies], settings, before=before)
    return {
        policy: {
            "makespan_s": one.result.makespan_s,
            "p50_s": one.result.completion.p50,
            "p95_s": one.result.completion.p95,
            "moves": one.result.moves,
            "reprefilled": one.result.reprefilled_tokens / max(1, one.result.prefilled_tokens),
            "idle": one.result.idle_share,
            "computed_s": one.computed_s,
        }
        for policy, one in zip(policies, done.values(), strict=True)
    }


def interval(values: Sequence[float]) -> str:
    """Mean and half the width of its 95 % interval."""
    if len(values) < 2:
        return f"{values[0]:.2f}"
    half = T_95.get(len(values), 1.96) * statistics.stdev(values) / len(values) ** 0.5
    return f"{statistics.fmean(values):.2f} ±{half:.2f}"


def rows_of(rows: Sequence[Row], policies: Sequence[str]) -> list[list[Any]]:
    """One line per policy, the shortest makespan first."""
    lines = []
    for policy in sorted(policies, key=lambda p: statistics.fmean(row[p]["makespan_s"] for row in rows)):
        mean = {key: statistics.fmean(row[policy][key] for row in rows) for key in rows[0][policy]}
        against = {
            other: (
                interval([row[policy]["makespan_s"] / row[other]["makespan_s"] for row in rows])
                if other in policies
                else "-"
            )
            for other in ("oracle", "cmlfq")
        }
        lines.append(
            [
                policy,
                f"{mean['makespan_s']:,.0f}",
                against["oracle"],
                against["cmlfq"],
                f"{mean['p50_s']:,.0f}",
                f"{mean['p95_s']:,.0f}",
                f"{mean['moves']:,.0f}",
                f"{mean['reprefilled']:.0%}",
                f"{mean['idle']:.0%}",
            ]
        )
    return lines


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--trajectories", type=int, default=512)
    parser.add_argument("--work", default="|".join(WORK), help="names separated by |, or '' for traces alone")
    parser.add_argument("--policy", default=",".join(POLICIES))
    parser.add_argument("--trace", action="append", default=[])
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    policies = list(dict.fromkeys(options.policy.split(",")))
    names = [name for name in options.work.split("|") if name] + options.trace
    jobs = [(name, seed, options.trajectories, policies) for name in names for seed in range(options.seeds)]
    with ProcessPoolExecutor(options.jobs) as pool:
        found = by_work(
            pool, play, jobs, lambda row: ", ".join(f"{p} {r['makespan_s']:,.0f} s" for p, r in row.items())
        )
    columns = ("policy", "makespan s", "x oracle", "x cmlfq", "p50 s", "p95 s", "moves", "re-pref.", "idle")
    for name, rows in found.items():
        label = Path(name).name.split(".")[0] if name in options.trace else name
        notes = [
            f"{options.seeds} seeds, {options.trajectories} trajectories, {GPUS} x {DEVICE}, {MODEL}, {BUCKETS}"
            " repeated"
        ]
        slug = "".join(c if c.isalnum() else "_" for c in label)
        report(f"scheduling_{slug}", label, columns=columns, rows=rows_of(rows, policies), notes=notes, raw=rows)


if __name__ == "__main__":
    main()
