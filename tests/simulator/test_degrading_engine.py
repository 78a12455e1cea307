"""An engine that becomes slow in mid-run loses its work, as fast as its reports justify."""

from __future__ import annotations

from statistics import fmean

from bench.controlled_simulation import ControlledSimulation
from libra_hpc.models.step_times.lookup import lookup
from libra_hpc.models.step_times.steps import StepTimes
from libra_hpc.policies.scheduling.cmlfq.causal_mlfq import CausalMlfq
from libra_hpc.policies.scheduling.slow_engines import SlowEngine, SlowEngines
from libra_hpc.simulator.settings import EngineSpec, SimulationSettings
from libra_hpc.traces.generate import Dials, generate
from libra_hpc.traces.profiles import R2E

SLOW_AT, FACTOR, EVERY_S = 100.0, 3.0, 5.0


class Degrading:
    """Step times that become `FACTOR` times as long."""

    def __init__(self, steps: StepTimes) -> None:
        self.tp, self.kv_capacity, self.source = steps.tp, steps.kv_capacity, steps.source
        self._step_s = steps.step_s
        self.factor = 1.0

    def step_s(self, decodes: int, kv_tokens: int, prefill: int = 0, context: int = 0) -> float:
        return self.factor * self._step_s(decodes, kv_tokens, prefill, context)


def test_work_leaves_an_engine_that_becomes_three_times_slower_gradually() -> None:
    steps = lookup("a800", "qwen3-14b", 4)
    degrading, slow = Degrading(steps), SlowEngines()
    engines = [EngineSpec(f"e{i}", 4, degrading if i == 2 else steps) for i in range(6)]
    shares: dict[float, float] = {}
    seen: list[SlowEngine] = []

    def watch(sim: ControlledSimulation, now: float) -> None:
        if now >= SLOW_AT:
            degrading.factor = FACTOR
        views = sim.board.engines
        total = sum(view.inflight_tokens for view in views.values())
        shares[now] = views["e2"].inflight_tokens / total if total else 0.0
        seen[:] = slow.update(sim.board, now) or seen

    work = generate(R2E, Dials(trajectories=192, seed=4))
    ControlledSimulation(
        work, engines, CausalMlfq(), SimulationSettings(), controller=watch, controller_s=EVERY_S
    ).run()

    spans = ((50, SLOW_AT), (SLOW_AT, SLOW_AT + 20), (SLOW_AT + 60, SLOW_AT + 160))
    before, soon, later = (fmean(share for at, share in shares.items() if a <= at < b) for a, b in spans)
    assert 0.1 < before < 0.3, "about a sixth"
    assert soon > 0.3 * before, "it keeps running turns, and long contexts"
    assert later < 0.3 * before
    assert [one.engine for one in seen] == ["e2"]
