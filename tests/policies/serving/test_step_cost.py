"""The cost of rollout steps is learned, and a step of the allowed tokens ends in time whatever they are spent on."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra_hpc.policies.serving.step_cost import GROWTH, MIN_STEPS, STALE_S, HighQuantile, StepCost, StepWork

DEVICES = {
    "tiny model on a CPU core": (0.005, 0.0003, 2e-7, 1e-4, 2e-8),
    "8B model on an A100": (0.012, 2e-5, 3e-8, 1e-4, 5e-11),
}


def seconds(device: tuple[float, ...], batch: StepWork) -> float:
    pairs = batch.prefill * (batch.context + batch.prefill / 2)
    x = (1, batch.decodes, batch.kv_tokens, batch.prefill, pairs)
    return sum(a * b for a, b in zip(device, x, strict=True))


def batches(rng: random.Random, count: int) -> list[StepWork]:
    found = []
    for _ in range(count):
        decodes = rng.randint(0, 16)
        prefill = rng.choice([0, 0, rng.randint(1, 512)]) if decodes else rng.randint(1, 512)
        found.append(
            StepWork(decodes, decodes * rng.randint(50, 3000), prefill, rng.randint(0, 2000) if prefill else 0)
        )
    return found


def learned(device: tuple[float, ...], noise: float = 0.1, steps: int = 400, seed: int = 1) -> StepCost:
    rng, cost = random.Random(seed), StepCost()
    for batch in batches(rng, steps):
        cost.observe(batch, seconds(device, batch) * (1 + noise * rng.random()), 0.0)
    return cost


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
def test_the_estimate_is_high_but_not_by_much(device: tuple[float, ...]) -> None:
    cost = learned(device)
    ratios = sorted(cost.seconds(batch) / seconds(device, batch) for batch in batches(random.Random(2), 200))
    assert 0.95 < ratios[10] <= ratios[-10] < 1.5


def test_outliers_move_it_little_and_a_device_that_becomes_slower_is_noticed() -> None:
    device = DEVICES["tiny model on a CPU core"]
    cost, probe = learned(device), StepWork(8, 8000, 256, 500)
    before = cost.seconds(probe)
    cost.observe(probe, 100 * before, 0.0)
    assert cost.seconds(probe) < 1.25 * before
    for batch in batches(random.Random(3), 30):
        cost.observe(batch, 2 * seconds(device, batch), 0.0)
    assert cost.seconds(probe) > 1.8 * seconds(device, probe)


def test_nothing_is_known_before_some_steps_and_after_a_silence() -> None:
    cost = StepCost()
    for _ in range(MIN_STEPS):
        assert not cost.known(5.0)
        cost.observe(StepWork(1, 10), 0.01, 5.0)
    assert cost.known(5.0 + STALE_S)
    assert not cost.known(5.1 + STALE_S)


def test_steps_grow_from_the_largest_measured() -> None:
    cost = StepCost()
    for _ in range(MIN_STEPS):
        cost.observe(StepWork(0, 0, 16, 0), 0.001, 0.0)
    assert cost.tokens(StepWork(0, 0, 4000, 0), 100.0) == GROWTH * 16


def test_a_step_that_fits_not_even_once_has_no_tokens() -> None:
    cost = learned(DEVICES["8B model on an A100"])
    assert cost.tokens(StepWork(4, 4000, 100, 0), 0.001) == 0


@st.composite
def work(draw: st.DrawFn) -> StepWork:
    decodes = draw(st.integers(0, 64))
    prefill = draw(st.integers(0 if decodes else 1, 4000))
    context = draw(st.integers(0, 8000)) if prefill else 0
    return StepWork(decodes, decodes * draw(st.integers(1, 8000)), prefill, context)


COST = learned(DEVICES["tiny model on a CPU core"])


@given(work(), st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_no_way_to_spend_the_tokens_takes_longer(there: StepWork, limit: float, share: float) -> None:
    budget = COST.tokens(there, limit)
    prefill = min(there.prefill, round(share * budget))
    decodes = min(there.decodes, budget - prefill)
    held = there.kv_tokens * decodes // max(1, there.decodes)
    spent = StepWork(decodes, held, prefill, there.context if prefill else 0)
    assert budget == 0 or COST.seconds(spent) <= limit * (1 + 1e-9)


@given(work(), st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_more_time_gives_no_fewer_tokens(there: StepWork, one: float, other: float) -> None:
    few, many = sorted((one, other))
    assert COST.tokens(there, few) <= COST.tokens(there, many)


def test_the_quantile_is_followed() -> None:
    rng, found = random.Random(4), HighQuantile(1.0)
    for _ in range(2000):
        found.add(rng.uniform(1.0, 2.0))
    assert 1.75 < found.value < 2.1
