"""When weights are requested for rollout, and again after a failure."""

from __future__ import annotations

from libra_hpc.protocol.trainer import Offered
from libra_hpc.train_leader.publisher import RequestedOffers


def answer(version: int, base: int = -1, writer: str = "t1.0") -> tuple[Offered, ...]:
    return (Offered(version, base, writer, 8, 4, 4, 0.5), Offered(version, base, "empty", 0, 0, 0, 0.5))


def test_a_version_is_asked_for_once_and_again_after_a_failure_or_a_change() -> None:
    offers = RequestedOffers((1,), -1)
    assert offers.ask(0, 0.0)
    assert not offers.ask(0, 0.0)
    assert not offers.failed(0.0)
    assert not offers.ask(0, 1.0)
    assert offers.ask(1, 2.0), "the newest one, once the pause is over"
    offers.ask_again()
    assert offers.ask(1, 2.0)
    assert offers.answered(1, answer(1)) == (1, -1, (("t1.0", 1),))
    offers.ask_again()
    assert not offers.ask(1, 2.0)
    assert [offers.failed(3.0) for _ in range(5)] == [False] * 4 + [True]


def test_whole_tensors_are_asked_for_where_an_answer_or_the_trainers_were_lost() -> None:
    def forget(offers: RequestedOffers) -> None:
        offers.ask(1, 0.0)
        offers.ask_again()

    for lose in (RequestedOffers.core_lost, forget, lambda offers: offers.lost(0), lambda offers: offers.failed(0.0)):
        offers = RequestedOffers((1,), -1)
        offers.ask(0, 0.0)
        offers.answered(1, answer(0))
        lose(offers)
        assert offers.base == -1


def test_a_version_is_published_once_all_nodes_of_the_core_offer_changes_of_the_same_one() -> None:
    offers = RequestedOffers((1, 2), -1)
    offers.ask(0, 0.0)
    assert offers.answered(2, answer(0, writer="t2.0")) is None
    assert offers.answered(3, answer(0)) is None, "not of the core"
    assert offers.answered(1, answer(0)) == (0, -1, (("t1.0", 1), ("t2.0", 2)))
    offers.ask(1, 0.0)
    offers.answered(1, answer(1, base=0))
    assert offers.answered(2, answer(1, writer="t2.0")) is None, "one began again"
    assert offers.ask(1, 0.0)
    assert offers.base == -1
