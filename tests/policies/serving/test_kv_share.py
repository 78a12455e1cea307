"""Memory of a borrowed engine: cut once, frozen, and given back when its owner is calm."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra_hpc.policies.serving.kv_share import LONGEST, KvShare, KvShareRule

RULE = KvShareRule(headroom=0.2, settle_s=1.0, thaw_s=10.0)


def play(kv: KvShare, uses: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """(time, share) of every change, of the server's use at these times."""
    return [(now, kv.share) for now, used in uses if kv.share != kv.decide(used, now)]


@pytest.mark.parametrize(
    ("uses", "changes"),
    [
        # A burst cuts once and freezes when that was not enough.
        ([(0, 0.8), (1, 0.81), (1.5, 0.95), (2, 0.95), (9, 0.99)], [(1, 0.5), (2, 0.0)]),
        # A cut that was enough stays a cut, also between the marks.
        ([(0, 0.85), (0.5, 0.9), (1, 0.79), *((float(now), 0.7) for now in range(5, 100))], [(0, 0.5)]),
        # A calm server gives one step at a time.
        (
            [(0, 0.9), (1, 0.9), (2, 0.5), (11.9, 0.5), (12, 0.5), (21, 0.5), (22, 0.5), (60, 0.5)],
            [(0, 0.5), (1, 0.0), (12, 0.5), (22, 1.0)],
        ),
    ],
)
def test_a_burst_cuts_or_freezes_and_a_calm_server_gives_back(
    uses: list[tuple[float, float]], changes: list[tuple[float, float]]
) -> None:
    assert play(KvShare(RULE), uses) == changes


def test_a_cut_soon_after_a_thaw_doubles_the_wait() -> None:
    kv, waits, now = KvShare(RULE), [], 0.0
    kv.decide(0.9, now)
    for _ in range(8):
        calm_at = now = now + 1
        before = kv.share
        while kv.decide(0.3, now) == before:
            now += 1
        waits.append(now - calm_at)
        now += 2
        assert kv.decide(0.9, now) == before
    assert waits == [10 * min(2**number, LONGEST) for number in range(8)]
    # Calm for long: the next cut counts as the first.
    while kv.share < 1:
        now += 1
        kv.decide(0.3, now)
    now += 10 * LONGEST + 1
    kv.decide(0.9, now)
    assert play(kv, [(now + 1, 0.3), (now + 10, 0.3), (now + 11, 0.3)]) == [(now + 11, 1.0)]


@given(st.lists(st.tuples(st.floats(0, 30), st.floats(0, 1)), max_size=60))
def test_memory_is_taken_only_above_the_mark_and_given_only_below_the_lower_one(
    uses: list[tuple[float, float]],
) -> None:
    kv, now = KvShare(KvShareRule()), 0.0
    for wait, used in uses:
        now, before = now + wait, kv.share
        after = kv.decide(used, now)
        assert abs(after - before) in (0, 0.5)
        assert after >= before or used > 0.8
        assert after <= before or used <= 0.6


@pytest.mark.parametrize("headroom", [0.0, 0.5])
def test_the_headroom_leaves_room_for_two_marks(headroom: float) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"headroom": headroom}, KvShareRule)
