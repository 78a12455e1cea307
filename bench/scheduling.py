"""Scheduling policies on the same simulated engines and work: makespan against C-MLFQ.

- Work: one batch of a preset of the generator, without history.
- Engines: three of TP8 on A800 with Qwen3-14B, 256 open trajectories each, the load of the A800 examples; step times
  are operator tables.
- ``--inflight 96,64``: limits of turns in flight at an engine; C-MLFQ has the first one.
- All policies of a seed get the same trajectories. Ratios are taken within a seed; their mean has a 95 % interval
  (Student's t over seeds).

    python -m bench.scheduling [--seeds 4] [--trajectories 768] [--rows NAME|NAME] [--policy NAME,...]
    [--gpus 24] [--buckets LIST] [--inflight 96,N,...] [--jobs 2]
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from bench.harness import by_row, interval, options, report, seeds
from bench.policies import POLICIES
from libra_hpc.policies.scheduling.registry import make_policy
from libra_hpc.simulator.engine.simulated_engines import build_engines
from libra_hpc.simulator.settings import SimulationSettings
from libra_hpc.simulator.simulate import simulate
from libra_hpc.traces.generate import Dials, generate

DEVICE, MODEL = "a800", "qwen3-14b"
WORK: dict[str, tuple[str, dict[str, Any]]] = {
    "r2e, outcomes tell": ("r2e", {"outcome": 1.0}),
    "r2e, groups of one": ("r2e", {"group": 1}),
    "search, outcomes tell": ("search", {"outcome": 1.0}),
    "math": ("math", {}),
    "documents": ("documents", {}),
}
COLUMNS = ("work", "policy", "makespan s", "x cmlfq", "p50 s", "p95 s", "moves", "re-pref.", "idle")
FORMATS = {"p50_s": "{:,.0f}", "p95_s": "{:,.0f}", "moves": "{:,.0f}", "reprefilled": "{:.0%}", "idle": "{:.0%}"}

Row = dict[str, dict[str, float]]


def play(job: tuple[str, int, int, list[str], str, int, list[int]]) -> Row:
    """All policies on the work of one seed, with each limit of turns in flight."""
    name, seed, trajectories, policies, buckets, gpus, limits = job
    engines, found = build_engines(buckets, gpus, DEVICE, MODEL).engines, Row()
    preset, dials = WORK[name]
    work = generate(preset, Dials(trajectories=trajectories, seed=seed, **dials))
    for limit in limits:
        settings = SimulationSettings(max_model_len=Dials().max_context, max_inflight=limit)
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
        return interval([row[policy]["makespan_s"] / row["cmlfq"]["makespan_s"] for row in results])

    ranked = sorted(mean.items(), key=lambda item: item[1]["makespan_s"])
    return [
        [name, policy, f"{facts['makespan_s']:,.0f}", ratio(policy)]
        + [form.format(facts[key]) for key, form in FORMATS.items()]
        for policy, facts in ranked
    ]


def main() -> None:
    defaults: dict[str, Any] = {"seeds": 4, "trajectories": 768, "policy": list(POLICIES), "jobs": 2}
    defaults |= {"gpus": 24, "buckets": "1xTP8", "inflight": [96]}
    given = options("scheduling", __doc__, rows=WORK, **defaults)
    how = (given.trajectories, given.policy, given.buckets, given.gpus, given.inflight)
    jobs = [(name, seed, *how) for name in given.rows for seed in seeds(given)]
    with ProcessPoolExecutor(given.jobs) as pool:
        found = by_row(pool, play, jobs, lambda row: ", ".join(f"{p} {r['makespan_s']:,.0f} s" for p, r in row.items()))
    rows = [line for name, results in found.items() for line in lines(name, results)]
    engines = f"{given.gpus} x {DEVICE}, {MODEL}, {given.buckets} repeated"
    notes = [f"{given.seeds} seeds, {given.trajectories} trajectories, {engines}"]
    report(given, "Policies on simulated engines", columns=COLUMNS, rows=rows, notes=notes, raw=found)


if __name__ == "__main__":
    main()
