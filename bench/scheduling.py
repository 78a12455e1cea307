"""Scheduling policies on the same simulated engines and work: makespan against C-MLFQ.

- Work: one batch without history, 256 or 512 open trajectories an engine, the load of the A800 examples; a recorded
  trace gives as many of its groups, drawn by the seed.
- Engines: TP8 on A800 with Qwen3-14B, where the row has no others; step times are operator tables.
- ``--inflight 384,96``: limits of turns in flight at an engine; C-MLFQ has the first one.
- All policies of a seed get the same trajectories. Ratios are taken within a seed; their mean has its standard error.

    python -m bench.scheduling [--seeds 4] [--rows NAME|NAME] [--trace FILE] [--policy NAME,...]
    [--inflight 384,N,...] [--jobs 2]
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from bench.fleets_rows import MAX_CONTEXT, Part, Setting, engines_of, generated
from bench.harness import by_row, options, report, seeds
from bench.policies import POLICIES
from libra_hpc.policies.scheduling.registry import make_policy
from libra_hpc.protocol.trace import TrajectoryRecord
from libra_hpc.simulator.settings import SimulationSettings
from libra_hpc.simulator.simulate import simulate
from libra_hpc.traces.read import read_trace

TWO, THREE, FOUR = ((("a800", gpus),) for gpus in (16, 24, 32))
WORK = {
    "r2e": Setting(pools=THREE, trajectories=768, dials=(("outcome", 1.0),)),
    "r2e, 512 each": Setting(pools=THREE, trajectories=1_536),
    "r2e, groups of one": Setting(pools=THREE, trajectories=768, group=1),
    "search": Setting("search", pools=THREE, trajectories=768, dials=(("outcome", 1.0),)),
    "math": Setting("math", pools=THREE, trajectories=768),
    "documents": Setting("documents", pools=THREE, trajectories=1_536),
    "deep search": Setting("deep search", pools=THREE, trajectories=768),
    "sessions": Setting("sessions", pools=THREE, trajectories=768, group=1),
    "mixed tools": Setting("mixed tools", pools=THREE, trajectories=768),
    "small tools": Setting("small tools", pools=TWO, trajectories=512),
    "63k": Setting("long", pools=THREE, trajectories=512),
    "slow engine": Setting(pools=FOUR, trajectories=1_024, slow=8),
    "30B-A3B": Setting(model="qwen3-30b-a3b", pools=TWO, trajectories=1_024),
}
TP = {"30B-A3B": 4}
"""By row, where it is not 8."""
COLUMNS = ("work", "policy", "makespan s", "x cmlfq", "p50 s", "p95 s", "moves", "re-pref.", "idle")
FORMATS = {"p50_s": "{:,.0f}", "p95_s": "{:,.0f}", "moves": "{:,.0f}", "reprefilled": "{:.0%}", "idle": "{:.0%}"}

Row = dict[str, dict[str, float]]


def recorded(path: str, count: int, seed: int) -> list[TrajectoryRecord]:
    """At least ``count`` trajectories of whole groups."""
    groups: dict[str, list[TrajectoryRecord]] = {}
    for one in read_trace(Path(path)).trajectories:
        if one.context <= MAX_CONTEXT:
            groups.setdefault(one.prompt_id, []).append(one)
    names, found = list(groups), list[TrajectoryRecord]()
    random.Random(seed).shuffle(names)
    while names and len(found) < count:
        found += groups[names.pop()]
    return found


def play(job: tuple[str, int, list[str], list[int]]) -> Row:
    """All policies on the work of one seed, with each limit of turns in flight."""
    name, seed, policies, limits = job
    row, found = WORK.get(name, Setting(pools=TWO, trajectories=512)), Row()
    count = row.trajectories
    work = generated(row, count, seed) if name in WORK else recorded(name, count, seed)
    tp = TP.get(name, 8)
    engines = engines_of(row, (Part(0, tp, row.pools[0][1] // tp),))
    for limit in limits:
        settings = SimulationSettings(max_model_len=MAX_CONTEXT, max_inflight=limit)
        for policy in policies:
            result = simulate(work, engines, make_policy(POLICIES[policy]), settings)
            found[policy if limit == limits[0] else f"{policy}, {limit} turns"] = {
                "makespan_s": result.makespan_s,
                "p50_s": result.completion.p50,
                "p95_s": result.completion.p95,
                "moves": result.moves,
                "reprefilled": result.reprefilled_tokens / max(1, result.prefilled_tokens),
                "idle": result.idle_share,
            }
    return found


def lines(name: str, results: Sequence[Row]) -> list[list[str]]:
    """One line per policy, the shortest makespan first."""
    mean = {
        policy: {key: statistics.fmean(row[policy][key] for row in results) for key in results[0][policy]}
        for policy in results[0]
    }

    def ratio(policy: str) -> str:
        if "cmlfq" not in mean:
            return "-"
        ratios = [row[policy]["makespan_s"] / row["cmlfq"]["makespan_s"] for row in results]
        error = f" ±{statistics.stdev(ratios) / len(ratios) ** 0.5:.3f}" if len(ratios) > 1 else ""
        return f"{statistics.fmean(ratios):.3f}{error}"

    ranked = sorted(mean.items(), key=lambda item: item[1]["makespan_s"])
    return [
        [name, policy, f"{facts['makespan_s']:,.0f}", ratio(policy)]
        + [form.format(facts[key]) for key, form in FORMATS.items()]
        for policy, facts in ranked
    ]


def main() -> None:
    defaults: dict[str, Any] = {"seeds": 4, "policy": list(POLICIES), "jobs": 2, "trace": True}
    defaults["inflight"] = [SimulationSettings().max_inflight]
    given = options("scheduling", __doc__, rows=WORK, **defaults)
    jobs = [(name, seed, given.policy, given.inflight) for name in given.rows for seed in seeds(given)]
    with ProcessPoolExecutor(given.jobs) as pool:
        found = by_row(pool, play, jobs, lambda row: ", ".join(f"{p} {r['makespan_s']:,.0f} s" for p, r in row.items()))
    rows = [line for name, results in found.items() for line in lines(name, results)]
    notes = [f"{given.seeds} seeds; a ratio has its standard error"]
    report(given, "Policies on simulated engines", columns=COLUMNS, rows=rows, notes=notes, raw=found)


if __name__ == "__main__":
    main()
