"""The gate: never a step that harms the owner's users more than he allows."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra_hpc.policies.serving.serving_view import ServingView
from libra_hpc.policies.serving.step_cost import MIN_STEPS, STALE_S, StepWork
from libra_hpc.policies.serving.step_gate import PROBE, SILENT_S, GateLimits, StepGate

LIMITS = GateLimits(ttft_s=0.5)
WORK = StepWork(decodes=4, kv_tokens=4000, prefill=2000, context=500)
NOW = 100.0
"""Seconds."""


def gate(limits: GateLimits = LIMITS) -> StepGate:
    """One that knows its steps: 10 ms and 0.1 ms a token."""
    found = StepGate(limits)
    for size in (64, 128, 256, 512, 1024) * MIN_STEPS:
        found.stepped(StepWork(2, 1000, size, 500), 0.01 + 1e-4 * size, 50.0)
    found.cost.observe(StepWork(2, 1000, 64, 500), 0.0164, NOW - 0.5)
    return found


def view(**fields: float) -> ServingView:
    return ServingView(**{"written": NOW, **fields})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("limits", "seen", "reason"),
    [
        (LIMITS, {}, "open"),
        (LIMITS, {"closed": True}, "closed"),
        (LIMITS, {"written": NOW - SILENT_S - 0.1}, "silent"),
        (LIMITS, {"written": -inf}, "silent"),
        (LIMITS, {"served": 1}, "served"),
        (LIMITS, {"served": 1, "closed": True}, "closed"),
        (LIMITS, {"served": 1, "written": NOW - 2.0}, "silent"),
        (LIMITS._replace(ttft_s=0.02), {}, "long"),
    ],
)
def test_decisions(limits: GateLimits, seen: dict[str, float], reason: str) -> None:
    decision = gate(limits).decide(view(**seen), WORK, NOW)
    assert decision.reason == reason
    assert (decision.tokens > 0) == (reason == "open")


def test_before_its_steps_are_known_it_probes_while_nobody_is_served() -> None:
    new = StepGate(LIMITS)
    assert new.decide(view(), WORK, NOW) == (PROBE, "probe")
    assert new.decide(view(served=1), WORK, NOW) == (0, "served")


def test_a_gate_that_found_its_steps_too_long_measures_them_again() -> None:
    found = gate(LIMITS._replace(ttft_s=0.02))
    assert found.decide(view(), WORK, NOW).reason == "long"
    later = NOW + STALE_S
    assert found.decide(view(written=later), WORK, later) == (PROBE, "probe")


views = st.builds(ServingView, closed=st.booleans(), written=st.floats(NOW - 3.0, NOW), served=st.integers(0, 2))
works = st.builds(StepWork, st.integers(0, 32), st.integers(0, 10**5), st.integers(0, 10**4), st.integers(0, 10**4))
KNOWING = gate()


@given(views, works)
def test_no_step_is_longer_than_the_share(seen: ServingView, work: StepWork) -> None:
    decision = KNOWING.decide(seen, work, NOW)
    if decision.tokens:
        decodes = min(work.decodes, decision.tokens)
        prefill = min(work.prefill, decision.tokens - decodes)
        spent = StepWork(decodes, work.kv_tokens * decodes // max(1, work.decodes), prefill, work.context)
        assert KNOWING.cost.seconds(spent) <= LIMITS.share * LIMITS.ttft_s * (1 + 1e-9)
