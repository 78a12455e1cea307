"""Borrowed engines: what a lender is, what it brings, and lenders that pause or leave all the time."""

from __future__ import annotations

import pytest

from libra_hpc.simulator.borrowing import Borrow, Borrowing, borrowing, lent_engines, parse_borrow
from libra_hpc.simulator.engine.simulated_engines import build_engines
from libra_hpc.simulator.settings import SimulationSettings
from libra_hpc.traces.generate import Dials, generate


def test_lenders_and_their_gain_are_read() -> None:
    lenders = {"16:code": (16, "code", 0.25), "3:chat:2": (3, "chat", 2.0), "4": (4, "code", 0.25)}
    assert {text: parse_borrow(text) for text in lenders} == {text: Borrow(*one) for text, one in lenders.items()}
    one = Borrowing(alone=100.0, borrowed=80.0, own=75.0, share=0.8, leaves=3, tokens=0.5)
    assert one.gain == 1.25
    assert one.of_own == pytest.approx(0.75)


def test_lenders_are_made_as_they_are_named() -> None:
    (like,) = build_engines("1xTP1", 1, "a800", "qwen3-8b").engines
    coded = lent_engines(Borrow(4, "code", 0.5), like, 2000.0, seed=1)
    rate = sum(len(one.lender.requests) for one in coded if one.lender) / 2000.0 / 4
    assert rate == pytest.approx(0.5, rel=0.3)
    spot = lent_engines(Borrow(2, "spot"), like, 5000.0, seed=1)
    assert all(one.lender and one.lender.away and not one.lender.requests for one in spot)


def test_lenders_that_pause_every_few_seconds_do_no_harm() -> None:
    engines = build_engines("1xTP1", 2, "a800", "qwen3-8b").engines
    work = generate("search", Dials(trajectories=96, max_context=32_768))
    settings = SimulationSettings(batch_groups=3, eta=1, train_s=5.0, max_model_len=32_768)
    flap = borrowing(work, engines, Borrow(2, "flap"), "cmlfq", settings)
    assert flap.gain > 0.99
    assert 0.3 < flap.share < 0.9
    assert flap.own < flap.alone
