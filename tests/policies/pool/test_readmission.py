"""Which lost nodes come back: a node that flaps costs its turns a few times, not for ever."""

from __future__ import annotations

import pytest

from libra_hpc.policies.pool.readmission import MEMORY_S, MOST, PROVE_S, Readmission


def flap(on_s: int, off_s: int, seconds: int) -> list[tuple[int, str]]:
    """Answers but ``wait`` to a node that is lost after 10 s of silence and seen once a second between."""
    found: list[tuple[int, str]] = []
    policy, inside, last = Readmission(), True, 0
    for now in range(seconds):
        seen = now % (on_s + off_s) < on_s
        if seen:
            last = now
        if inside and now - last >= 10:
            policy.lost(3, now)
            inside = False
        if seen and not inside and (answer := policy.seen(3, now)) != "wait":
            found.append((now, answer))
            inside = answer == "take"
    return found


def test_a_second_loss_needs_a_proof_without_a_gap() -> None:
    policy = Readmission()
    for at in (100.0, 200.0):
        policy.lost(3, at)
    beats = [*range(210, 230), *range(240, 272)]
    answers = {now: policy.seen(3, now) for now in beats}
    assert [now for now, answer in answers.items() if answer == "take"] == [240 + PROVE_S, 271]


@pytest.mark.parametrize(("on_s", "off_s"), [(5, 24), (20, 24)])
def test_a_flapping_node_is_taken_back_once(on_s: int, off_s: int) -> None:
    assert [answer for _, answer in flap(on_s, off_s, 600)] == ["take"]


def test_a_node_that_fails_again_and_again_is_quarantined_once() -> None:
    answers = [answer for _, answer in flap(400, 24, 6000)]
    assert answers == ["take"] * (MOST - 1) + ["quarantine"]


def test_old_losses_are_forgotten() -> None:
    policy = Readmission()
    for count in range(3 * MOST):
        policy.lost(3, count * MEMORY_S)
        assert policy.seen(3, count * MEMORY_S + 1.0) == "take"
