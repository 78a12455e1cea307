"""When weights are requested for rollout, and again after a failure."""

from __future__ import annotations

from libra_hpc.protocol.trainer import Offered
from libra_hpc.train_leader.exports import Exports


def answer(version: int, base: int = -1, owner: str = "t1.0") -> tuple[Offered, ...]:
    return (Offered(version, base, owner, 8, 4, 4, 0.5), Offered(version, base, "empty", 0, 0, 0, 0.5))


def test_a_version_is_asked_for_once_and_again_after_a_failure_or_a_change() -> None:
    exports = Exports((1,), -1)
    assert exports.ask(0, 0.0)
    assert not exports.ask(0, 0.0)
    assert not exports.failed(0.0)
    assert not exports.ask(0, 1.0)
    assert exports.ask(1, 2.0), "the newest one, once the pause is over"
    exports.ask_again()
    assert exports.ask(1, 2.0)
    assert exports.answered(1, answer(1)) == (1, -1, (("t1.0", 1),))
    exports.ask_again()
    assert not exports.ask(1, 2.0)
    assert [exports.failed(3.0) for _ in range(5)] == [False] * 4 + [True]


def test_an_offer_builds_on_the_version_that_was_published_last() -> None:
    exports = Exports((1,), -1)
    assert exports.base == -1
    exports.ask(0, 0.0)
    exports.answered(1, answer(0))
    assert exports.base == 0


def test_whole_tensors_are_asked_for_where_an_answer_or_the_trainers_were_lost() -> None:
    def forget(exports: Exports) -> None:
        exports.ask(1, 0.0)
        exports.ask_again()

    for lose in (Exports.core_lost, forget, lambda exports: exports.lost(0), lambda exports: exports.failed(0.0)):
        exports = Exports((1,), -1)
        exports.ask(0, 0.0)
        exports.answered(1, answer(0))
        lose(exports)
        assert exports.base == -1


def test_a_version_is_published_once_all_nodes_of_the_core_offer_changes_of_the_same_one() -> None:
    exports = Exports((1, 2), -1)
    exports.ask(0, 0.0)
    assert exports.answered(2, answer(0, owner="t2.0")) is None
    assert exports.answered(3, answer(0)) is None, "not of the core"
    assert exports.answered(1, answer(0)) == (0, -1, (("t1.0", 1), ("t2.0", 2)))
    exports.ask(1, 0.0)
    exports.answered(1, answer(1, base=0))
    assert exports.answered(2, answer(1, owner="t2.0")) is None, "one began again"
    assert exports.ask(1, 0.0)
    assert exports.base == -1
