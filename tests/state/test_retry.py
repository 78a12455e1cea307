from __future__ import annotations

from libra_hpc.state.retry import Exports, Retry


def test_pauses_double_up_to_the_longest_and_start_over_after_a_success() -> None:
    retry, now, waits = Retry(10.0, 60.0), 100.0, []
    assert retry.due(now)
    for _ in range(5):
        retry.failed(now)
        waits.append(retry.wait_s(now))
        assert not retry.due(now + waits[-1] - 0.1)
        now += waits[-1]
        assert retry.due(now)
    assert waits == [10.0, 20.0, 40.0, 60.0, 60.0]
    for _ in range(2000):
        retry.failed(now)
    assert retry.wait_s(now) == 60.0
    retry.succeeded()
    assert retry.due(now)
    retry.failed(now)
    assert retry.wait_s(now) == 10.0


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
