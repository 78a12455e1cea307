"""Which engine is ended for its log-probabilities, and which are not."""

from __future__ import annotations

import pytest

from libra_hpc.policies.learning.engine_gaps import LEAST_TOKENS, WINDOW, EngineGaps, EngineOff

OWN = {"a": "", "b": "", "c": ""}
LENT = {"a": "", "r10000.0": "lender", "r10001.0": "lender"}


def observe(
    gaps: EngineGaps, lenders: dict[str, str], step: int, tokens: int = LEAST_TOKENS, **nats: float
) -> EngineOff | None:
    """A step in which every engine generated ``tokens``; ``nats``: mean gaps that are not 0.02."""
    return gaps.observe(step, {one: (nats.get(one, 0.02) * tokens, tokens) for one in lenders}, lenders)


def test_an_engine_beyond_the_others_is_reloaded_and_closed_once_it_is_so_again() -> None:
    gaps = EngineGaps(eta=1)
    assert observe(gaps, OWN, 1) is None
    first = observe(gaps, OWN, 2, b=0.9)
    assert first is not None
    assert (first.engine, first.action) == ("b", "reload")
    assert first.reason == "its log-probabilities differ from the trainer's by 0.46 nats, those of the others by 0.02"
    # Tokens of before are trained as long as the staleness bound allows.
    assert [observe(gaps, OWN, step, b=0.9) for step in (3, 4)] == [None, None]
    second = observe(gaps, OWN, 5, b=0.9)
    assert second is not None
    assert (second.engine, second.action) == ("b", "close")


def test_one_that_is_right_after_its_reload_stays() -> None:
    gaps = EngineGaps(eta=0)
    assert observe(gaps, OWN, 1, c=2.0) is not None
    assert [observe(gaps, OWN, step) for step in range(2, 3 * WINDOW)] == [None] * (3 * WINDOW - 2)


@pytest.mark.parametrize(
    ("lenders", "nats", "tokens"),
    [
        (OWN, {"b": 0.11}, LEAST_TOKENS),
        (OWN, {"a": 0.4, "b": 0.5, "c": 0.9}, LEAST_TOKENS),
        (OWN, {"b": 0.9}, LEAST_TOKENS // WINDOW - 1),
        ({"a": "", "b": ""}, {"b": 0.9}, LEAST_TOKENS),
        ({"r1": "l", "r2": "m"}, {"r2": 0.9}, LEAST_TOKENS),
    ],
    ids=("a little", "all", "few tokens", "two own ones", "two borrowed ones"),
)
def test_what_proves_nothing_ends_no_engine(lenders: dict[str, str], nats: dict[str, float], tokens: int) -> None:
    gaps = EngineGaps(eta=0)
    assert [observe(gaps, lenders, step, tokens, **nats) for step in range(2 * WINDOW)] == [None] * 2 * WINDOW


def test_borrowed_ones_are_ended_first_and_one_a_step() -> None:
    gaps, lenders = EngineGaps(eta=9), {**OWN, "d": "", "r10000.0": "lender"}
    off = [observe(gaps, lenders, step, d=3.0, **{"r10000.0": 0.9}) for step in (1, 2, 3)]
    assert [one and one.engine for one in off] == ["r10000.0", "d", None]


def test_the_engine_of_a_lender_that_comes_again_is_closed_at_once() -> None:
    gaps = EngineGaps(eta=0)
    actions = []
    for step, engine in enumerate(("r10000.0", "r10001.0"), 1):
        lenders = {one: lender for one, lender in LENT.items() if one in ("a", engine)}
        off = observe(gaps, lenders, step, **{engine: 0.9})
        actions.append(off and off.action)
    assert actions == ["reload", "close"]
