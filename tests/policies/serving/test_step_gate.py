"""The gate: never a step that harms the owner's users more than he allows."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra_hpc.policies.serving.server_pace import ServerPace
from libra_hpc.policies.serving.serving_view import ServingView
from libra_hpc.policies.serving.step_cost import MIN_STEPS, STALE_S, StepWork
from libra_hpc.policies.serving.step_gate import PROBE, SILENT_S, GateLimits, StepGate

LIMITS = GateLimits(ttft_s=0.5, tpot_s=0.15)
SLACK = LIMITS._replace(give="slack")
WORK = StepWork(decodes=4, kv_tokens=4000, prefill=2000, context=500)
NOW = 100.0
"""Seconds."""


def gate(limits: GateLimits = LIMITS, paced: bool = True) -> StepGate:
    """One that knows its steps (10 ms and 0.1 ms a token), and the server's (20 ms; 1 ms per 100 bytes)."""
    found = StepGate(limits)
    for size in (64, 128, 256, 512, 1024) * MIN_STEPS:
        found.stepped(StepWork(2, 1000, size, 500), 0.01 + 1e-4 * size, 50.0)
    if paced:
        for at, seen in (
            (NOW - 9.0, {"served": 2, "last_token": NOW - 9.0}),
            (NOW - 8.98, {"served": 2, "last_token": NOW - 8.98}),
            (NOW - 8.0, {"served": 1, "waiting": 1, "arrival": NOW - 8.0, "waiting_bytes": 1000}),
            (NOW - 7.97, {"served": 1, "last_token": NOW - 7.97}),
        ):
            found.pace.observe(ServingView(written=at, **seen), at)
    found.cost.observe(StepWork(2, 1000, 64, 500), 0.0164, NOW - 0.5)
    return found


def view(**fields: float) -> ServingView:
    return ServingView(**{"written": NOW, **fields})  # type: ignore[arg-type]


WAITING = {"served": 1, "waiting": 1, "arrival": NOW - 0.1, "waiting_bytes": 1000}
STREAMING = {"served": 1, "last_token": NOW - 0.01}


@pytest.mark.parametrize(
    ("limits", "seen", "reason"),
    [
        (LIMITS, {}, "open"),
        (LIMITS, {"closed": True}, "closed"),
        (LIMITS, {"written": NOW - SILENT_S - 0.1}, "silent"),
        (LIMITS, {"written": -inf}, "silent"),
        (LIMITS, WAITING, "served"),
        (LIMITS, STREAMING, "served"),
        (SLACK, {}, "open"),
        (SLACK, {**STREAMING, "closed": True}, "closed"),
        (SLACK, {**STREAMING, "written": NOW - 2.0}, "silent"),
        (SLACK, WAITING, "open"),
        (SLACK, STREAMING, "open"),
        (SLACK, {**WAITING, "arrival": NOW - 0.49}, "slack"),
        (SLACK, {**WAITING, "waiting_bytes": 100_000}, "slack"),
        (SLACK, {**STREAMING, "last_token": NOW - 0.14}, "slack"),
        (SLACK, {**WAITING, "served": 2, "last_token": NOW - 0.14}, "slack"),
        (LIMITS._replace(ttft_s=0.02), {}, "long"),
    ],
)
def test_decisions(limits: GateLimits, seen: dict[str, float], reason: str) -> None:
    decision = gate(limits).decide(view(**seen), WORK, NOW)
    assert decision.reason == reason
    assert (decision.tokens > 0) == (reason == "open")


def test_the_least_slack_bounds_the_step() -> None:
    seen = gate(SLACK).decide(view(served=2, waiting=1, arrival=NOW, last_token=NOW - 0.1), WORK, NOW)
    # 150 ms after the last token, less a step of 20 ms.
    assert seen.limit_s == pytest.approx(0.03, abs=1e-6)


def test_slack_gives_nothing_beside_users_of_unknown_pace() -> None:
    for seen in (WAITING, STREAMING):
        assert gate(SLACK, paced=False).decide(view(**seen), WORK, NOW).reason == "slack"


def test_before_its_steps_are_known_it_probes_while_nobody_is_served() -> None:
    for limits in (LIMITS, SLACK):
        new = StepGate(limits)
        assert new.decide(view(), WORK, NOW)[:2] == (PROBE, "probe")
        assert new.decide(view(**STREAMING), WORK, NOW)[:2] == (0, "served")


def test_a_gate_that_found_its_steps_too_long_measures_them_again() -> None:
    found = gate(LIMITS._replace(ttft_s=0.02))
    assert found.decide(view(), WORK, NOW).reason == "long"
    later = NOW + STALE_S
    assert found.decide(view(written=later), WORK, later)[:2] == (PROBE, "probe")


def test_neither_a_rollout_step_nor_what_happened_unseen_teaches_the_pace_of_the_server() -> None:
    pace = ServerPace()
    for token, seen, learned in (
        (1.49, 1.5, inf),
        (1.54, 1.54, inf),  # after a rollout step
        (9.0, 9.0, inf),  # much happened unseen
        (9.02, 9.02, 0.02),
    ):
        pace.observe(ServingView(served=1, last_token=token), seen)
        assert pace.decode_s == pytest.approx(learned)
        if seen == 1.5:
            pace.stepped(1.53)


views = st.builds(
    ServingView,
    closed=st.booleans(),
    written=st.floats(NOW - 3.0, NOW),
    served=st.integers(0, 8),
    waiting=st.integers(0, 8),
    arrival=st.floats(NOW - 1.0, NOW),
    last_token=st.floats(NOW - 0.3, NOW),
    waiting_bytes=st.integers(0, 10**6),
).map(lambda one: one._replace(waiting=min(one.waiting, one.served)))
works = st.builds(StepWork, st.integers(0, 32), st.integers(0, 10**5), st.integers(0, 10**4), st.integers(0, 10**4))
KNOWING = {"idle": gate(), "slack": gate(SLACK)}


@given(st.sampled_from(["idle", "slack"]), views, works)
def test_no_step_is_longer_than_the_share(give: str, seen: ServingView, work: StepWork) -> None:
    found = KNOWING[give]
    decision = found.decide(seen, work, NOW)
    if decision.tokens:
        assert decision.limit_s <= LIMITS.share * LIMITS.ttft_s
        decodes = min(work.decodes, decision.tokens)
        prefill = min(work.prefill, decision.tokens - decodes)
        spent = StepWork(decodes, work.kv_tokens * decodes // max(1, work.decodes), prefill, work.context)
        assert found.cost.seconds(spent) <= decision.limit_s * (1 + 1e-9)


@given(st.sampled_from(["idle", "slack"]), views, works)
def test_closed_silent_or_served_means_no_step(give: str, seen: ServingView, work: StepWork) -> None:
    decision = KNOWING[give].decide(seen, work, NOW)
    if seen.closed or NOW - seen.written > SILENT_S or (seen.served and give == "idle"):
        assert decision.tokens == 0


@given(views, works, st.floats(0.0, 0.5))
def test_a_user_who_has_waited_longer_leaves_no_more_tokens(seen: ServingView, work: StepWork, longer: float) -> None:
    found = KNOWING["slack"]
    older = seen._replace(arrival=seen.arrival - longer, last_token=seen.last_token - longer)
    # Views that follow each other teach the pace.
    found.pace.observe(ServingView(), NOW)
    tokens = found.decide(seen, work, NOW).tokens
    found.pace.observe(ServingView(), NOW)
    assert found.decide(older, work, NOW).tokens <= tokens
