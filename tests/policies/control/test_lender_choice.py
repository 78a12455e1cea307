"""Which servers a run borrows: what they save against their start and their price, and how many GPUs at most."""

from __future__ import annotations

from msgspec.structs import replace

from libra_hpc.policies.control.borrow_choice import fitting
from libra_hpc.protocol.plan import BorrowFact, OfferFact, PlanDecision

from .plant import Plant, ideal


def offer(name: str, nodes: float = 1.0, *, gpus: int = 8, lends: bool = False) -> OfferFact:
    return OfferFact(name, gpus, nodes, lends)


def plant(*offers: OfferFact, rollout_s: float = 3.0, **more: object) -> Plant:
    """40 batches of a run beside these offers, whose starts take 60 s; training takes 0.7 s of each."""
    fact = replace(BorrowFact(0, 0, float("-inf"), 60.0, offers=offers), **more)
    lent = sum(one.nodes for one in offers if one.lends)
    return Plant(ideal(0.7, rollout_s), hybrids=0, noise=0.02, lent=lent, spot=fact).batches(40)


def decided(one: Plant, steps_left: int = 500) -> PlanDecision:
    return one.planner().decide(one.snapshot(steps_left), one.now)


def paying(decision: PlanDecision) -> list[str]:
    return [name for name, (saved_s, needed_s) in decision.lenders.items() if saved_s > needed_s]


def test_those_that_pay_are_borrowed_the_greatest_gain_per_gpu_first() -> None:
    one = plant(offer("busy", 0.4), offer("idle"), offer("small", 0.25, gpus=1))
    decision = decided(one)
    assert decision.action == "borrow"
    assert list(decision.lenders) == ["small", "idle", "busy"]
    assert paying(decision) == ["small", "idle", "busy"]
    assert decision.lenders["idle"][1] == 1.5 * 60.0
    assert "over 500 steps small saves" in decision.reason
    late = decided(one, steps_left=20)
    assert (late.action, paying(late)) == ("hold", [])
    assert late.lenders["idle"][0] > 0.0
    for seconds, action in ((3.0, "hold"), (0.5, "give_back")):
        assert decided(plant(offer("idle"), rollout_s=seconds, taken=frozenset({"idle"}))).action == action


def test_a_price_keeps_those_out_that_save_less_beside_their_start() -> None:
    offers = offer("busy", 0.5), offer("idle")
    assert paying(decided(plant(*offers))) == ["idle", "busy"]
    decision = decided(plant(*offers, gpu_price_s=20.0))
    assert paying(decision) == ["idle"]
    assert decision.lenders["busy"][1] == 1.5 * 60.0 + 8 * 20.0


def test_no_more_gpus_are_borrowed_than_the_run_wants_and_those_that_lend_stay() -> None:
    offers = offer("a", 0.5, lends=True), offer("b"), offer("c", 0.9)
    assert [one.name for one in fitting(offers, 16)] == ["a", "b"]
    assert [one.name for one in fitting(offers, 0)] == ["a", "b", "c"]
    assert fitting(offers, 7) == []
    assert paying(decided(plant(*offers, most_gpus=16))) == ["a", "b"]


def test_a_lender_that_brings_nothing_any_more_goes_back_and_none_within_a_start() -> None:
    one = plant(offer("a", lends=True))
    assert decided(one).action == "hold", "what has started needs no margin"
    one.shape = ideal(0.7, 0.5)
    one.batches(40)
    decision = decided(one)
    assert (decision.action, paying(decision)) == ("give_back", [])
    one.spot = replace(one.spot, since=one.now - 59.0)
    assert decided(one).action == "hold"
