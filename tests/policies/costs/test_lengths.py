"""The sketch of a batch's lengths, and the cost of KV that is too small, against the simulator."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra_hpc.errors import UserError
from libra_hpc.models.step_times.lookup import lookup
from libra_hpc.models.step_times.steps import StepTimes
from libra_hpc.planning.work import Assumed, Work
from libra_hpc.policies.costs.lengths import BatchWork, TrajectoryLengths, lognormal, observe, sketch
from libra_hpc.policies.costs.rollout_time import ReplicaCost, RolloutOptions
from libra_hpc.policies.scheduling.rules import LeastLoaded
from libra_hpc.protocol.trace import TrajectoryRecord, TurnRecord
from libra_hpc.simulator.result import SimulationResult
from libra_hpc.simulator.settings import EngineSpec, SimulationSettings
from libra_hpc.simulator.simulate import simulate
from tests.policies.control.plant_costs import FakeSteps, one_turn


@given(st.lists(st.integers(1, 50_000), min_size=1, max_size=300), st.integers(1, 2000))
def test_totals_and_order(generated: list[int], batch: int) -> None:
    made = sketch(one_turn(*generated), batch)
    assert sum(b.share for b in made.bins) == pytest.approx(1.0)
    assert made.generated == pytest.approx(sum(generated) / len(generated))
    assert made.context == pytest.approx(made.generated + 10)
    assert [b.generated for b in made.bins] == sorted(b.generated for b in made.bins)
    assert made.bins[-1].longest == made.longest_context == max(generated) + 10


def test_size_grows_with_the_logarithm_of_the_batch_only() -> None:
    assert [len(sketch(one_turn(*range(1, 100_001)), size).bins) for size in (512, 8192)] == [21, 25]


def test_the_longest_of_a_batch_has_its_own_bin() -> None:
    *_, before, last = sketch(one_turn(*[100] * 511, 90_000), 512).bins
    assert (before.generated, last.generated) == (100, 90_000)
    assert last.share * 512 == pytest.approx(1.0)


def test_the_slowest_of_two_open_batches_is_slower_than_that_of_one() -> None:
    tools = [*[1.0] * 62, 10.0, 30.0]
    made = [TrajectoryLengths(generated=n, context=n + 10, prompt=10, tool_s=s) for n, s in enumerate(tools, 100)]
    one, two = (sketch(made, 32, eta) for eta in (0, 1))
    assert (one.bins[-1].most_tool_s, one.bins[-1].open_tool_s) == (20.0, 20.0)
    assert (two.bins[-1].most_tool_s, two.bins[-1].open_tool_s) == (20.0, 30.0)
    assert (one.open_generated, two.open_generated) == (162.5, 163.0)


def test_ratios_of_a_trace() -> None:
    turns = (TurnRecord(new_tokens=0, gen_tokens=30, tool="run", outcome="ok", tool_s=2.0), TurnRecord(50, 10))
    made = sketch(
        observe([TrajectoryRecord("p", 0, 100, turns), TrajectoryRecord("q", 0, 100, (TurnRecord(0, 40),))]), 2
    )
    assert (made.prompt, made.generated, made.context, made.longest_context) == (100, 40, 165, 190)
    assert made.new_per_token == pytest.approx(50 / 80)
    assert made.turns_per_token == pytest.approx(3 / 80)
    assert made.tool_s_per_token == pytest.approx(2 / 80)
    assert made.context_square == pytest.approx((190**2 + 140**2) / 2)


def test_a_stated_distribution_has_its_mean_and_tail() -> None:
    made = lognormal(generated=1000, sigma=1.0, prompt=10)
    total = sum(o.generated for o in made)
    assert total / len(made) == pytest.approx(1000, rel=0.02)
    assert sum(o.generated for o in made[-len(made) // 10 :]) / total == pytest.approx(0.39, abs=0.01)
    cut = lognormal(generated=1000, sigma=1.0, prompt=10, new_tokens=100, turns=5, longest=4096)
    assert max(o.context for o in cut) <= 4096


@pytest.mark.parametrize(
    "bad",
    [
        TrajectoryLengths(0, 10, 5),
        TrajectoryLengths(5, 8, 5),
        TrajectoryLengths(5, 20, 5, 0),
        TrajectoryLengths(generated=5, context=20, prompt=5, turns=1, tool_s=-1.0),
    ],
)
def test_impossible_counts(bad: TrajectoryLengths) -> None:
    with pytest.raises(UserError, match="contradict"):
        sketch([bad], 8)


def test_no_lengths() -> None:
    with pytest.raises(UserError, match="no finished trajectory"):
        sketch([], 8)
    with pytest.raises(UserError, match="sigma = -1"):
        lognormal(generated=10, sigma=-1, prompt=1)


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


def play(work: list[TrajectoryRecord], steps: StepTimes) -> SimulationResult:
    """One replica, one batch, everything at once."""
    limits = SimulationSettings(
        max_inflight=10**6, max_num_seqs=SEQS, max_num_batched_tokens=2048, block_size=16, send_s=0.0, answer_s=0.0
    )
    return simulate(work, [EngineSpec("e", 1, steps)], LeastLoaded(), limits)


def predicted(work: list[TrajectoryRecord], steps: StepTimes) -> float:
    """The same by the cost model."""
    batch = BatchWork(len(work), sketch(observe(work), len(work)), 0)
    replica = ReplicaCost(steps, batch, RolloutOptions(max_num_seqs=SEQS, prefix_hits=0.99))
    return replica.time(0, len(batch.lengths.bins) - 1, 1)


WORK = {
    "equal lengths": (96, Assumed(1000, 0.0, 1000, 1, 0, 0.0)),
    "equal lengths, mostly generated": (96, Assumed(3000, 0.0, 300, 1, 0, 0.0)),
    "unequal lengths": (96, Assumed(1000, 0.4, 1000, 1, 0, 0.0)),
    "a heavy tail": (96, Assumed(3000, 0.8, 300, 1, 0, 0.0)),
    "turns": (64, Assumed(2000, 0.3, 1000, 8, 300, 1.0)),
    "long turns and slow tools": (64, Assumed(2000, 0.8, 1000, 4, 1000, 5.0)),
}


@pytest.mark.parametrize("share", [0.6, 0.3, 0.15])
@pytest.mark.parametrize("name", WORK)
def test_short_kv_costs_what_the_simulator_plays(name: str, share: float) -> None:
    """The cache holds that share of the contexts."""
    count, assumed = WORK[name]
    work = Work((), assumed, 10**6).batch(count, 1, seed=1)
    capacity = max(int(share * sum(one.context for one in work)), max(one.context for one in work) + 64)
    steps = FakeSteps(1, capacity, fixed=0.02, each=1e-4, kv=5e-8, new=1e-4)
    played = play(work, steps)
    assert predicted(work, steps) == pytest.approx(played.makespan_s, rel=0.15)
    if share < 0.5:
        assert played.preemptions > 0
