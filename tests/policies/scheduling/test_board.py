"""The board against brute force: least, free, levels, and costs."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libra_hpc.policies.scheduling.board import Board
from libra_hpc.policies.scheduling.costs import TP_EXPONENT, default_costs

from .boards import board, set_cap, stats

NAMES = ("a", "b", "c", "d", "e", "f")
VERBS = ("up", "down", "sent", "answered", "open", "close", "cap")
operations = st.lists(
    st.tuples(st.sampled_from(VERBS), st.sampled_from(NAMES), st.integers(1, 900), st.sampled_from((1, 2, 4))),
    max_size=120,
)


def check(made: Board) -> None:
    """What the board should hold, computed from the views alone."""
    assert made.free == sum(max(0, v.cap - v.inflight) for v in made.engines.values() if v.open)
    assert [c.tp for c in made.classes] == sorted({v.tp for v in made.engines.values()})
    for level, members in enumerate(made.classes):
        assert members.level == level
        assert all(v.level == level and v.tp_class is members for v in members.members)


@settings(deadline=None)
@given(operations)
def test_the_board_equals_brute_force_after_any_operations(steps: list[tuple[str, str, int, int]]) -> None:
    made = Board(3)
    in_flight: list[tuple[str, int]] = []
    for what, name, number, tp in steps:
        if what == "up":
            made.up(name, tp, 1000, 0)
            in_flight = [f for f in in_flight if f[0] != name]
        elif what == "down":
            made.down(name)
            in_flight = [f for f in in_flight if f[0] != name]
        elif what == "answered" and in_flight:
            made.answered(*in_flight.pop(number % len(in_flight)))
        elif name in made.engines:
            if what == "sent":
                made.sent(name, number)
                in_flight.append((name, number))
            elif what in ("open", "close"):
                made.set_open(name, what == "open")
            elif what == "cap":
                set_cap(made, name, number % 5)
        check(made)


def test_costs_of_a_class_follow_its_reports_and_reach_the_others_scaled() -> None:
    made = board(("slow", 1), ("fast", 4), kv=1000)
    assert made.classes[0].base_s == default_costs(1, 1000)[0]
    steps, prefill, busy = 0, 0, 0.0
    for i in range(400):
        kv = (i * 7 % 10) / 10
        made.report("fast", stats(steps, busy, kv=kv, prefill=prefill))
        following = ((i + 1) * 7 % 10) / 10
        more, read = 20 + i % 5, 1000 * (i % 4)
        busy += more * (0.004 + 2e-6 * 1000 * (kv + following) / 2) + 1e-5 * read
        steps, prefill = steps + more, prefill + read
    fast, slow = made.classes[1], made.classes[0]
    assert (fast.base_s, fast.slope_s, fast.prefill_s) == pytest.approx((0.004, 2e-6, 1e-5), rel=0.15)
    assert slow.base_s == pytest.approx(fast.base_s * 4**TP_EXPONENT, rel=0.05)


def test_a_warm_up_profile_prices_a_class_before_its_first_turn() -> None:
    made = Board(64)
    # 16 steps of 4 ms, then a step that prefills 256 tokens in 20 ms; here the larger class is slower.
    for name, tp, decoded, prefilled in (("large", 2, 1.064, 1.084), ("small", 1, 1.032, 1.042)):
        reports = (stats(20, 1.0, kv=0.0), stats(36, decoded, kv=0.0), stats(37, prefilled, kv=0.0, prefill=256))
        made.up(name, tp=tp, kv_capacity=1000, version=0, warm_up=reports)
    small, large = made.classes
    assert (small.base_s, large.base_s) == pytest.approx((0.002, 0.004), rel=0.1)
    assert small.prefill_s < large.prefill_s
    # The counters restart after the warm-up profile: the first report gives no difference to it.
    count = small.fit.count
    made.report("small", stats(90, 0.4))
    assert small.fit.count == count
    made.report("small", stats(110, 0.5))
    assert small.fit.count == count + 1
