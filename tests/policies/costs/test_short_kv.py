"""KV that is too small: its capacity, and the cost of waiting, preemption and lost prefixes, against the simulator."""

from __future__ import annotations

import math
import random

import pytest

from libra_hpc.models.devices import device
from libra_hpc.models.step_times.lookup import lookup
from libra_hpc.models.step_times.steps import StepTimes
from libra_hpc.policies.costs.lengths import observe, sketch
from libra_hpc.policies.costs.rollout_time import ReplicaCost, RolloutOptions
from libra_hpc.policies.costs.training_time import BatchWork
from libra_hpc.policies.scheduling.rules.least_loaded import LeastLoaded
from libra_hpc.protocol.trace import TrajectoryRecord, TurnRecord
from libra_hpc.simulator.result import SimResult
from libra_hpc.simulator.settings import EngineSpec, SimSettings
from libra_hpc.simulator.simulate import simulate
from tests.policies.control.plant_costs import FakeSteps

CAPACITY = {
    ("a100", "qwen3-8b"): (386_460, 880_170, 1_870_691, 3_852_472),
    ("a100", "qwen3-32b"): (29_218, 306_802, 863_522, 1_976_994),
    ("h200", "qwen3-32b"): (254_088, 756_542, 1_763_003, 3_775_957),
}
"""Tokens of KV cache at TP 1, 2, 4, 8, by aiconfigurator-core 0.12.0 (vLLM, 0.9 of the memory, 2,048 tokens a step)."""
SEQS = 256


@pytest.mark.parametrize("case", CAPACITY)
def test_capacity_is_that_of_another_memory_model(case: tuple[str, str]) -> None:
    for tp, wanted in zip((1, 2, 4, 8), CAPACITY[case], strict=True):
        assert lookup(*case, tp).kv_capacity == pytest.approx(wanted, rel=0.06), f"TP{tp}"


def rollout(
    count: int, prompt: int, generated: int, sigma: float, turns: int = 1, new: int = 0, tool_s: float = 0.0
) -> list[TrajectoryRecord]:
    """Log-normal trajectories with turns in proportion."""
    draw, made = random.Random(1), []
    for number in range(count):
        tokens = max(1.0, generated * math.exp(sigma * draw.gauss(0, 1) - sigma**2 / 2))
        rounds = max(1, round(turns * tokens / generated))
        each = max(1, int(tokens / rounds))
        calls = tuple(
            TurnRecord(new_tokens=new if k else 0, gen_tokens=each, tool="tool", outcome="ok", tool_s=tool_s)
            for k in range(rounds - 1)
        )
        made.append(TrajectoryRecord(f"p{number}", 0, prompt, (*calls, TurnRecord(new if calls else 0, each))))
    return made


def play(work: list[TrajectoryRecord], steps: StepTimes) -> SimResult:
    """One replica, one batch, everything at once."""
    limits = SimSettings(
        max_inflight=10**6, max_num_seqs=SEQS, max_num_batched_tokens=2048, block_size=16, send_s=0.0, answer_s=0.0
    )
    return simulate(work, [EngineSpec("e", 1, steps)], LeastLoaded(), limits)


def predicted(work: list[TrajectoryRecord], steps: StepTimes) -> float:
    """The same by the cost model."""
    batch = BatchWork(len(work), sketch(observe(work), len(work)), 0)
    replica = ReplicaCost(steps, batch, RolloutOptions(max_num_seqs=SEQS, prefix_hits=0.99))
    return replica.time(0, len(batch.lengths.bins) - 1, 1)


WORK = {
    "equal lengths": (96, 1000, 1000, 0.0),
    "equal lengths, mostly generated": (96, 300, 3000, 0.0),
    "unequal lengths": (96, 1000, 1000, 0.4),
    "a heavy tail": (96, 300, 3000, 0.8),
    "turns": (64, 1000, 2000, 0.3, 8, 300, 1.0),
    "long turns and slow tools": (64, 1000, 2000, 0.8, 4, 1000, 5.0),
}


@pytest.mark.parametrize("share", [0.6, 0.3, 0.15])
@pytest.mark.parametrize("name", WORK)
def test_short_kv_costs_what_the_simulator_plays(name: str, share: float) -> None:
    """The cache holds that share of the contexts."""
    work = rollout(*WORK[name])
    capacity = max(int(share * sum(one.context for one in work)), max(one.context for one in work) + 64)
    steps = FakeSteps(1, capacity, fixed=0.02, each=1e-4, kv=5e-8, new=1e-4)
    played = play(work, steps)
    assert predicted(work, steps) == pytest.approx(played.makespan_s, rel=0.15)
    if share < 0.5:
        assert played.preemptions > 0


@pytest.mark.parametrize(
    ("model", "count", "generated"), [("qwen3-32b", 32, 1000), ("qwen3-32b", 64, 2000), ("qwen3-14b", 128, 4000)]
)
def test_so_on_a_real_device(model: str, count: int, generated: int) -> None:
    """Where KV is short on one A100: at 32B nearly all memory is weights."""
    work, steps = rollout(count, 1000, generated, 0.0), lookup(device("a100"), model, 1)
    assert predicted(work, steps) == pytest.approx(play(work, steps).makespan_s, rel=0.1)
