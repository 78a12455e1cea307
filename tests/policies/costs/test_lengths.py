"""The sketch preserves totals, isolates the longest trajectory, and does not grow with their number."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra_hpc.errors import UserError
from libra_hpc.policies.costs.lengths import TrajectoryLengths, lognormal, observe, sketch
from libra_hpc.protocol.trace import TrajectoryRecord, TurnRecord
from tests.policies.control.plant_costs import one_turn


@given(st.lists(st.integers(1, 50_000), min_size=1, max_size=300), st.integers(1, 2000))
def test_totals_and_order(generated: list[int], batch: int) -> None:
    made = sketch(one_turn(*generated), batch)
    assert sum(b.share for b in made.bins) == pytest.approx(1.0)
    assert made.generated == pytest.approx(sum(generated) / len(generated))
    assert made.context == pytest.approx(made.generated + 10)
    assert [b.generated for b in made.bins] == sorted(b.generated for b in made.bins)
    assert made.bins[-1].longest == made.longest_context == max(generated) + 10


def test_size_grows_with_the_logarithm_of_the_batch_only() -> None:
    assert len(sketch(one_turn(*range(1, 100_001)), 512).bins) == 21
    assert len(sketch(one_turn(*range(1, 100_001)), 8192).bins) == 25


def test_the_longest_of_a_batch_has_its_own_bin() -> None:
    made = sketch(one_turn(*[100] * 511, 90_000), 512)
    assert made.bins[-1].generated == 90_000
    assert made.bins[-1].share * 512 == pytest.approx(1.0)
    assert made.bins[-2].generated == 100


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
    assert (
        max(o.context for o in lognormal(generated=1000, sigma=1.0, prompt=10, new_tokens=100, turns=5, longest=4096))
        <= 4096
    )


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
