"""Every scheduling policy on the same simulated engines and work: makespan against C-MLFQ.

- Work: presets of the generator (tool outcomes or siblings informative or not; long documents), one batch of 512
  trajectories without history; the same in the third epoch; and ``--trace`` files, sampled per seed.
- Engines: 48 A800 with Qwen3-14B, 12xTP1, 6xTP2, 6xTP4; step times are operator tables.  ``--gpus 24 --buckets 1xTP8
  --trajectories 768`` is the load of the A800 examples: 256 trajectories an engine.
- ``--inflight 96,64``: each policy also with another constant limit of turns in flight at an engine.
- All policies of a seed get the same trajectories.  Ratios are taken within a seed; their mean has a 95 % interval
  (Student's t over seeds).

    python -m bench.scheduling [--seeds 5] [--trajectories 512] [--rows NAME|NAME] [--policy NAME,...]
    [--gpus 48] [--buckets LIST] [--inflight 96,N,...] [--trace FILE ...] [--jobs 2]
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from bench.harness import by_row, interval, options, report, seeds
from bench.policies import POLICIES
from libra_hpc.protocol.trace import TrajectoryRecord
from libra_hpc.simulator.compare import Compared, compare
from libra_hpc.simulator.engine.simulated_engines import build_engines
from libra_hpc.simulator.settings import SimulationSettings
from libra_hpc.traces.generate import Dials, generate
from libra_hpc.traces.read import read_trace

DEVICE, MODEL = "a800", "qwen3-14b"
INFLIGHT = SimulationSettings().max_inflight
MAX_CONTEXT = Dials().max_context
"""Where the generator ends trajectories, as a run file would; for a recorded trace it is unknown."""
WORK: dict[str, tuple[str, dict[str, Any]]] = {
    "r2e, outcomes tell": ("r2e", {"outcome": 1.0}),
    "r2e, siblings alone tell": ("r2e", {"outcome": 0.0}),
    "r2e, nothing tells": ("r2e", {"outcome": 0.0, "sibling": 0.0}),
    "search, outcomes tell": ("search", {"outcome": 1.0}),
    "search, nothing tells": ("search", {"outcome": 0.0, "sibling": 0.0}),
    "r2e, groups of one": ("r2e", {"group": 1}),
    "math, siblings tell": ("math", {}),
    "math, nothing tells": ("math", {"sibling": 0.0}),
    "documents, siblings tell": ("documents", {}),
    "r2e, outcomes tell, third epoch": ("r2e", {"outcome": 1.0, "epochs": 3}),
    "r2e, siblings alone tell, third epoch": ("r2e", {"outcome": 0.0, "epochs": 3}),
    "search, outcomes tell, third epoch": ("search", {"outcome": 1.0, "epochs": 3}),
    "math, siblings tell, third epoch": ("math", {"epochs": 3}),
}
COLUMNS = ("work", "policy", "makespan s", "x cmlfq", "p50 s", "p95 s", "moves", "re-pref.", "idle")
FORMATS = {"p50_s": "{:,.0f}", "p95_s": "{:,.0f}", "moves": "{:,.0f}", "reprefilled": "{:.0%}", "idle": "{:.0%}"}

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


def play(job: tuple[str, int, int, list[str], str, int, list[int]]) -> Row:
    """All policies on the work of one seed, with each limit of turns in flight; the last epoch counts."""
    name, seed, trajectories, policies, buckets, gpus, limits = job
    built = build_engines(buckets, gpus, DEVICE, MODEL)
    work, settings = work_of(name, seed, trajectories), SimulationSettings()
    before: list[list[TrajectoryRecord]] = []
    if name in WORK:
        settings = SimulationSettings(max_model_len=MAX_CONTEXT)
        *before, work = [work[start : start + trajectories] for start in range(0, len(work), trajectories)]
    paths, found = [POLICIES[name] for name in policies], dict[str, Compared]()
    for limit in limits:
        done = compare(work, built.engines, paths, replace(settings, max_inflight=limit), before=before)
        named = policies if limit == INFLIGHT else [f"{policy}, {limit} turns" for policy in policies]
        found |= dict(zip(named, done.values(), strict=True))
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
        for policy, one in found.items()
    }


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
    every = ",".join(POLICIES)
    defaults: dict[str, Any] = {"seeds": 5, "trajectories": 512, "policy": every, "jobs": 2}
    defaults |= {"gpus": 48, "buckets": "4xTP1,2xTP2,2xTP4", "inflight": [INFLIGHT]}
    given = options("scheduling", __doc__, rows=WORK, trace=True, **defaults)
    policies = list(dict.fromkeys(given.policy.split(",")))
    how = (given.trajectories, policies, given.buckets, given.gpus, given.inflight)
    jobs = [(name, seed, *how) for name in given.rows for seed in seeds(given)]
    with ProcessPoolExecutor(given.jobs) as pool:
        found = by_row(pool, play, jobs, lambda row: ", ".join(f"{p} {r['makespan_s']:,.0f} s" for p, r in row.items()))
    rows = [line for name, results in found.items() for line in lines(Path(name).name.split(".")[0], results)]
    engines = f"{given.gpus} x {DEVICE}, {MODEL}, {given.buckets} repeated"
    notes = [f"{given.seeds} seeds, {given.trajectories} trajectories, {engines}"]
    report(given, "Policies on simulated engines", columns=COLUMNS, rows=rows, notes=notes, raw=found)


if __name__ == "__main__":
    main()
