"""Rollout: exact integrals of made-up devices, the straggler bound, tools, and short KV."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra_hpc.models.step_times.lookup import lookup
from libra_hpc.policies.costs.factors import Factors
from libra_hpc.policies.costs.lengths import BatchWork, TrajectoryLengths, sketch
from libra_hpc.policies.costs.rollout_time import ReplicaCost, RolloutOptions
from tests.policies.control.plant_costs import FakeSteps, agentic, batch_of


def batch_like(count: int, generated: int, prompt: int, eta: int = 0, tool_s: float = 0.0) -> BatchWork:
    """A batch of equal trajectories of one turn."""
    one = TrajectoryLengths(generated=generated, context=prompt + generated, prompt=prompt, turns=1, tool_s=tool_s)
    return BatchWork(count, sketch([one], count), eta)


def seconds_of(replica: ReplicaCost, replicas: int, lag: float = 0.0) -> float:
    """Seconds of all lengths of the batch."""
    return replica.time(0, len(replica._batch.lengths.bins) - 1, replicas, lag)


def test_a_draining_batch_is_the_integral_over_its_live_number() -> None:
    """Steps of (1 + live) s: 10 positions with 4 trajectories, 20 with 3, 40 with 2, 80 with 1."""
    batch = batch_of(10, 30, 70, 150)
    replica = ReplicaCost(FakeSteps(1, fixed=1.0, each=1.0), batch)
    assert replica.time(0, 3, 1) == pytest.approx(10 * 5 + 20 * 4 + 40 * 3 + 80 * 2, rel=0.01)
    assert replica.time(2, 3, 1) == pytest.approx(70 * 3 + 80 * 2, rel=0.01)

    # Steps of constant length: eta + 1 batches are open during the longest trajectory.
    for eta in range(4):
        replica = ReplicaCost(FakeSteps(1, fixed=0.5), batch_of(10, 30, 70, 150, eta=eta))
        assert replica.time(0, 3, 1) == pytest.approx(150 * 0.5 / (eta + 1), rel=1e-3)


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=12), st.integers(0, 2), st.integers(1, 50))
def test_never_below_the_straggler_and_never_slower_with_more_replicas(
    generated: list[int], eta: int, replicas: int
) -> None:
    replica = ReplicaCost(FakeSteps(2, fixed=0.01, each=1e-3, kv=1e-6, new=1e-4), batch_of(*generated, eta=eta))
    straggler = max(generated) * replica.position_s(1, 10) / (eta + 1)
    assert seconds_of(replica, replicas) >= 0.999 * straggler
    assert seconds_of(replica, replicas + 1) <= seconds_of(replica, replicas) * (1 + 1e-12)


def test_tools_delay_a_trajectory_and_leave_room_for_others() -> None:
    """100 tokens and 100 s of tools: alone they add up; many trajectories fill the gaps."""
    steps = FakeSteps(1, fixed=1.0, each=0.1)
    without, with_tools = (ReplicaCost(steps, batch_like(64, 100, 10, tool_s=tool)) for tool in (0.0, 100.0))
    assert with_tools.position_s(1, 50) == pytest.approx(without.position_s(1, 50) + 1.0)
    # Some of the 64 are in their tool, so that steps are shorter: less than the sum.
    assert seconds_of(without, 1) < seconds_of(with_tools, 1) < seconds_of(without, 1) + 100


@pytest.mark.parametrize("eta", [0, 1])
def test_the_slowest_tools_decide_a_batch_whose_longest_answer_is_quick(eta: int) -> None:
    some = [TrajectoryLengths(10, 100, 10, 2, tool_s=tool) for tool in (*[1.0] * 6, 1000.0)]
    lengths = sketch([*some, TrajectoryLengths(200, 300, 10, 2, tool_s=1.0)], 8)
    replica = ReplicaCost(FakeSteps(1, fixed=0.5), BatchWork(8, lengths, eta))
    # Ten tokens and the tools; the longest one needs 101 s.
    assert seconds_of(replica, 4) == pytest.approx(1005.0 / (eta + 1), rel=0.01)


@pytest.mark.parametrize("slowest", [{"generated": 1_000}, {"tool_s": 500.0}])
def test_the_slowest_of_both_open_batches_holds_them_up(slowest: dict[str, Any]) -> None:
    """Two batches of eight have one of these, so each has half of one."""
    usual = {"generated": 10, "tool_s": 0.0}
    some = [{**usual, **changed} for changed in (*[{}] * 15, slowest)]
    lengths = sketch([TrajectoryLengths(context=2_000, prompt=10, **one) for one in some], 8, 1)
    replica = ReplicaCost(FakeSteps(1, fixed=0.5), BatchWork(8, lengths, 1))
    assert seconds_of(replica, 8) == pytest.approx(250.0, rel=0.03)


def test_prompts_are_computed_once_and_tool_results_between_steps() -> None:
    batch = BatchWork(4, sketch([TrajectoryLengths(100, 100 + 1000 + 300, 1000, 3)] * 4, 4), 0)
    replica = ReplicaCost(FakeSteps(1, fixed=1e-9, new=1e-3), batch, RolloutOptions(prefix_hits=1.0))
    assert seconds_of(replica, 1) == pytest.approx(4 * (1000 + 300) * 1e-3, rel=0.02)


def test_lost_prefixes_are_computed_again() -> None:
    batch = agentic(64)
    steps = FakeSteps(1, fixed=1e-3, new=1e-4)
    times = [seconds_of(ReplicaCost(steps, batch, RolloutOptions(prefix_hits=hits)), 4) for hits in (1.0, 0.9, 0.5)]
    assert times == sorted(times)
    assert times[2] > 1.5 * times[0]


def test_short_kv_limits_the_batch_and_brings_evicted_context_back() -> None:
    batch = agentic(256)
    ample, short = (
        ReplicaCost(FakeSteps(1, capacity, fixed=0.02, each=1e-5, new=1e-5), batch) for capacity in (10**8, 60_000)
    )
    assert seconds_of(short, 4) > 2 * seconds_of(ample, 4)
    refilled_free = ReplicaCost(FakeSteps(1, 60_000, fixed=0.02, each=1e-5, new=0.0), batch)
    assert seconds_of(short, 4) > seconds_of(refilled_free, 4)


@pytest.mark.parametrize("capacity", range(900, 1100, 7))
def test_one_sequence_that_fills_the_cache_loses_nothing_to_others(capacity: int) -> None:
    replica = ReplicaCost(FakeSteps(1, capacity, fixed=0.02), batch_of(100, 900))
    assert 0.0 < replica.position_s(1.0, float(capacity)) < math.inf


def test_a_context_beyond_the_kv_cache_is_impossible_with_a_reason() -> None:
    batch = batch_of(100, 5000)
    replica = ReplicaCost(FakeSteps(1, 1000), batch)
    assert (replica.time(0, 1, 9), replica.time(0, 0, 9) < math.inf, replica.limit()) == (math.inf, True, None)
    limited = RolloutOptions(max_model_len=4096)
    for limit, reason in (
        (replica.limit(1), "its KV cache holds 1,000 tokens, trajectories may have 5,010"),
        (ReplicaCost(FakeSteps(1, 1000), batch, limited).limit(), "4,096"),  # the engine would not even start
        (ReplicaCost(FakeSteps(1, 0), batch).limit(), "no room for a KV cache"),
    ):
        assert reason in limit.reason


@given(
    st.lists(st.integers(1, 9000), min_size=2, max_size=10),
    st.integers(0, 1),
    st.lists(st.floats(0.1, 500.0), min_size=1, max_size=6),
    st.integers(1, 40),
)
def test_fewest_replicas_whatever_was_asked_before(
    generated: list[int], eta: int, questions: list[float], most: int
) -> None:
    replica = ReplicaCost(FakeSteps(1, fixed=0.01, each=2e-3, new=1e-4), batch_of(*generated, eta=eta))
    last = len(replica._batch.lengths.bins) - 1
    for seconds in questions:
        able = [n for n in range(1, most + 1) if seconds_of(replica, n) <= seconds]
        assert replica.fewest(0, last, seconds, most) == (able[0] if able else None)


def test_each_factor_scales_its_own_term() -> None:
    batch, quiet = (batch_like(4, 110, 1000, tool_s=tool) for tool in (50.0, 0.0))

    def seconds(steps: FakeSteps, factors: Factors = Factors()) -> float:  # noqa: B008
        return seconds_of(ReplicaCost(steps, batch, RolloutOptions(), factors), 4)

    decode = FakeSteps(1, fixed=1.0)
    assert ReplicaCost(decode, quiet, RolloutOptions(), Factors(decode=2.0)).position_s(1, 1000) == pytest.approx(2.0)
    assert seconds(decode, Factors(tool=2.0)) == pytest.approx(seconds(decode) + 50)
    prefill = FakeSteps(1, fixed=1e-9, new=1e-3)
    more = seconds(prefill, Factors(prefill=2.0)) - seconds(prefill)
    assert more == pytest.approx(1000 * 1e-3, rel=0.05)


def test_a_shared_prompt_is_computed_once_on_every_replica_that_gets_one_of_its_trajectories() -> None:
    batch = batch_like(64, 2, 8000)
    device_steps = lookup("a800", "qwen3-14b", 4)

    def prompts(group: int, replicas: int) -> float:
        """Seconds of prompts, on all replicas together."""
        whole, without = (
            ReplicaCost(device_steps, batch, RolloutOptions(group=group), Factors(prefill=p)).time(0, 0, replicas)
            for p in (1.0, 1e-9)
        )
        return (whole - without) * replicas

    alone = prompts(1, 4)
    assert prompts(8, 1) == pytest.approx(alone / 8, rel=0.01)
    assert prompts(8, 4) == pytest.approx(alone * 4 * (1 - 0.75**8) / 8, rel=0.01)
    assert prompts(8, 1000) == pytest.approx(alone, rel=0.01)


def test_a_weight_update_has_the_running_contexts_computed_again() -> None:
    batch = batch_like(64, 200, 8000, eta=1)
    steps = lookup("a800", "qwen3-14b", 4)
    plain, updated = (
        ReplicaCost(steps, batch, RolloutOptions(max_num_seqs=8, updates=n)).time(0, 0, 2) for n in (0, 1)
    )
    assert updated - plain == pytest.approx(8 * 8100 * steps.step_s(0, 0, 2048, 0) / 2048, rel=0.05)


def test_long_prompts_of_short_answers_do_not_stand_beside_the_tokens_of_long_ones() -> None:
    lengths = sketch([TrajectoryLengths(100, 12_100, 12_000), TrajectoryLengths(9900, 10_000, 100)], 2)
    assert (lengths.prompt, lengths.prompt_beside) == pytest.approx((6050, 0.01 * 12_000 + 0.99 * 100))
    assert lengths.context_at(1000) == pytest.approx(1000 + lengths.prompt_beside)


def test_prompts_that_wait_for_a_training_step_leave_less_time_for_the_longest() -> None:
    """Two batches open, the longest takes 1000 s: it ends one training step before the end of the second batch."""
    alone = ReplicaCost(FakeSteps(1, fixed=1.0), batch_like(2, 1000, 10, eta=1))
    assert alone.time(0, 0, 100) == pytest.approx(500)
    assert alone.time(0, 0, 100, 200.0) == pytest.approx((1000 + 200) / 2)
    # Where steps last as long as they have sequences, fewer open ones cost no throughput.
    crowded = ReplicaCost(FakeSteps(1, fixed=1e-9, each=1.0), batch_of(*[1000] * 64, eta=1))
    assert crowded.time(0, 0, 1, 200.0) == pytest.approx(crowded.time(0, 0, 1), rel=0.01)
    # A wait for training means nothing when stages take turns.
    replica = ReplicaCost(FakeSteps(1, fixed=0.01, each=2e-3), batch_of(10, 200, 3000, eta=0))
    assert replica.time(0, 2, 2, 500.0) == replica.time(0, 2, 2)


@given(st.lists(st.integers(1, 9000), min_size=2, max_size=10), st.integers(1, 3), st.floats(0.0, 1e4))
def test_a_longer_wait_is_never_faster_and_costs_at_most_its_share(lengths: list[int], eta: int, lag: float) -> None:
    replica = ReplicaCost(FakeSteps(1, fixed=0.01, each=2e-3, new=1e-4), batch_of(*lengths, eta=eta))
    without, half, whole = (seconds_of(replica, 3, wait) for wait in (0.0, lag / 2, lag))
    assert without <= half * (1 + 1e-9)
    assert half <= whole * (1 + 1e-9)
    assert whole <= (without + lag / (eta + 1)) * (1 + 1e-9)


def test_long_trajectories_with_fewer_turns_do_not_wait_for_the_tools_of_short_ones() -> None:
    short, long = TrajectoryLengths(100, 1110, 10, 10, 10.0), TrajectoryLengths(5000, 5110, 10, 2, 10.0)
    lengths = sketch([short] * 31 + [long], 32)
    _, at_start = lengths.open_at(0.0)
    context, late = lengths.open_at(4000.0)
    assert at_start.tool_s == pytest.approx((31 * 0.1 + 0.002) / 32)
    assert late == pytest.approx((100 / 5000, 2 / 5000, 10 / 5000))
    assert context == pytest.approx(10 + 4000 * (1 + 100 / 5000))
    assert lengths.generated_at(context) == pytest.approx(4000, rel=1e-3)
    replica = ReplicaCost(FakeSteps(1, fixed=0.1), BatchWork(32, lengths, 0))
    assert seconds_of(replica, 1000) == pytest.approx(500 + 10 + 10, rel=0.02), "both have 10 s of tools"


def test_a_scheduler_that_lets_in_what_the_cache_holds_is_not_slowed_by_the_rest() -> None:
    batch = agentic(256)
    steps = FakeSteps(1, 60_000, fixed=0.02, each=1e-5, new=1e-4)
    crowded, admitted = (ReplicaCost(steps, batch, RolloutOptions(cache_aware=aware)) for aware in (False, True))
    assert seconds_of(admitted, 1) < 0.9 * seconds_of(crowded, 1)
    assert seconds_of(admitted, 256) == pytest.approx(seconds_of(crowded, 256)), "one each: nothing to wait for"


def test_samples_beside_their_siblings_share_the_prompt() -> None:
    batch = batch_like(64, 2, 8000)
    steps = FakeSteps(1, fixed=1e-9, new=1e-3)
    apart, beside = (
        ReplicaCost(steps, batch, RolloutOptions(group=8, cache_aware=aware)).time(0, 0, 4) for aware in (False, True)
    )
    assert beside == pytest.approx(1.3 * 64 / 8 * 8.0 / 4, rel=0.02)
    assert apart == pytest.approx(4 * (1 - 0.75**8) * 64 / 8 * 8.0 / 4, rel=0.02)
