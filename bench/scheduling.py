"""Scheduling policies on the same simulated engines and work: their makespans over that of C-MLFQ.

- Work: one batch without history, 256 or 512 open trajectories an engine, the load of the A800 examples.
- Engines: on A800, with today's defaults; step times are operator tables, with steps ahead.
- All policies of a seed get the same trajectories.
"""

from __future__ import annotations

from typing import NamedTuple

from bench.policies import POLICIES
from bench.profiles import GROUP, MAX_CONTEXT, work_named
from libra_hpc.models.devices import device
from libra_hpc.models.step_times.lookup import lookup
from libra_hpc.models.step_times.steps import StepTimes
from libra_hpc.policies.scheduling.registry import make_policy
from libra_hpc.simulator.settings import EngineSpec, SimulationSettings
from libra_hpc.simulator.simulate import simulate


class Batch(NamedTuple):
    work: str = "r2e"
    """Profiles of `bench.profiles`."""
    engines: int = 3
    each: int = 256
    """Trajectories an engine."""
    model: str = "qwen3-14b"
    tp: int = 8
    group: int = GROUP
    slow: int = 0
    """Engines at half the speed, which nobody knows."""


BATCHES = {
    "coding": Batch(),
    "coding, 512 each": Batch(each=512),
    "coding, groups of one": Batch(group=1),
    "search": Batch("search"),
    "math": Batch("math"),
    "documents": Batch("documents", each=512),
    "deep search": Batch("deep search"),
    "sessions": Batch("sessions", group=1),
    "mixed tools": Batch("r2e+slow tools"),
    "small tools": Batch("small tools", engines=2),
    "63k": Batch("long"),
    "slow engine": Batch(engines=4, slow=1),
    "30B-A3B": Batch(engines=4, model="qwen3-30b-a3b", tp=4),
}
RIVALS = ("fit", "thunder_agent", "program_age", "kv_router")


class Slow:
    """Step times of an engine that takes twice as long."""

    def __init__(self, steps: StepTimes) -> None:
        self.tp, self.kv_capacity, self.source = steps.tp, steps.kv_capacity, steps.source
        self._step_s = steps.step_s

    def step_s(self, decodes: int, kv_tokens: int, prefill: int = 0, context: int = 0) -> float:
        return 2.0 * self._step_s(decodes, kv_tokens, prefill, context)


def engines_of(row: Batch) -> list[EngineSpec]:
    """The engines; slow ones are in the middle."""
    steps: StepTimes = lookup(device("a800").asynchronous(), row.model, row.tp)
    first = (row.engines - row.slow) // 2
    return [
        EngineSpec(f"e{n}", row.tp, Slow(steps) if first <= n < first + row.slow else steps) for n in range(row.engines)
    ]


def makespans(name: str, seed: int, policies: tuple[str, ...] = RIVALS) -> dict[str, float]:
    """Those of the policies over that of C-MLFQ."""
    row = BATCHES[name]
    work = work_named(row.work, row.group).batch(row.each * row.engines // row.group, seed)
    settings = SimulationSettings(max_model_len=MAX_CONTEXT, async_steps=True)
    took = {
        policy: simulate(work, engines_of(row), make_policy(POLICIES[policy]), settings).makespan_s
        for policy in ("cmlfq", *policies)
    }
    return {policy: took[policy] / took["cmlfq"] for policy in policies}
