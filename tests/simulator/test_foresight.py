"""The foresight of the oracle, and that it pays."""

from __future__ import annotations

import pytest

from libra_hpc.protocol.trace import TrajectoryRecord, TurnRecord
from libra_hpc.simulator.baselines.oracle import OracleWork
from libra_hpc.simulator.foresight import foresight_of
from libra_hpc.simulator.policies import make_simulated_policy, simulated_policy_names
from libra_hpc.simulator.settings import EngineSpec, SimSettings
from libra_hpc.simulator.simulate import simulate
from libra_hpc.traces.generate import Dials, generate

from .futures import Linear


def test_the_future_of_each_turn() -> None:
    turns = (TurnRecord(0, 100, "run", "ok", 2.0), TurnRecord(30, 50, "run", "ok", 4.0), TurnRecord(7, 20))
    engines = [EngineSpec("a", 1, Linear(1)), EngineSpec("b", 1, Linear(1)), EngineSpec("c", 4, Linear(4))]
    future = foresight_of([TrajectoryRecord("p", 0, 500, turns)], engines, SimSettings(max_num_seqs=8))
    name = "p/0"
    assert future.truth(name, 0) == OracleWork(170, 500, 37, 6.0)
    assert future.truth(name, 1) == OracleWork(70, 30, 7, 4.0)
    assert future.truth(name, 2) == OracleWork(20, 7, 0, 0.0)
    assert {tp: steps.tp for tp, steps in future.steps.items()} == {1: 1, 4: 4}
    assert future.max_num_seqs == 8


@pytest.mark.parametrize("preset", ["search", "math"])
def test_no_baseline_ends_sooner_than_the_oracle(preset: str) -> None:
    work = generate(preset, Dials(trajectories=64, group=8, seed=3, max_context=60_000))
    engines = [
        EngineSpec(f"{tp}-{i}", tp, Linear(tp, 400_000 * tp))
        for tp, count in ((1, 4), (2, 2), (4, 1))
        for i in range(count)
    ]
    settings = SimSettings(max_num_seqs=16, max_inflight=24)
    future = foresight_of(work, engines, settings)
    ends = {}
    for name in simulated_policy_names():
        if name != "cmlfq":
            result = simulate(work, engines, make_simulated_policy(name, future), settings)
            assert result.trajectories == 64
            ends[name] = result.makespan_s
    assert min(ends, key=ends.__getitem__) == "oracle", ends
