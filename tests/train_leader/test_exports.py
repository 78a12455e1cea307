"""When weights are requested for rollout, and again after a failure."""

from __future__ import annotations

from libra_hpc.train_leader.exports import Exports


def test_a_version_is_asked_for_once_and_again_after_a_failure_or_a_change() -> None:
    exports = Exports(-1)
    assert exports.ask(0, 0.0)
    assert not exports.ask(0, 0.0)
    assert not exports.failed(0.0)
    assert not exports.ask(0, 1.0)
    assert exports.ask(1, 2.0), "the newest one, once the pause is over"
    exports.ask_again()
    assert exports.ask(1, 2.0)
    exports.written(1, 0.5)
    exports.ask_again()
    assert not exports.ask(1, 2.0)
    assert [exports.failed(3.0) for _ in range(5)] == [False] * 4 + [True]
