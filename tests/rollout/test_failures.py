"""Failed attempts: back-off, pauses of admission, and the end of a run, under scripted and random histories."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from libra_hpc.rollout.attempts import Attempts
from libra_hpc.rollout.failures import ENOUGH, LONGEST_S, MAX_STRIKES, WINDOW, Failure, FailureBook
from libra_hpc.rollout.trajectory import Trajectory


def why(error: str = "KeyError: 'x'", kind: str = "raised") -> Failure:
    return Failure(kind, "toy", "p", error)


def paused(patience_s: float = 600.0) -> FailureBook:
    book = FailureBook(0.2, patience_s)
    for index in range(ENOUGH):
        book.failed((index, 0), why(), 0.0)
    decision = book.evaluate(4, ENOUGH, 0.0)
    assert decision is not None
    assert decision.action == "pause"
    return book


def test_a_trajectory_waits_longer_each_time_and_is_given_up_at_its_third_failure() -> None:
    book = FailureBook(0.2, 600.0)
    assert [book.failed((0, 0), why(), 0.0) for _ in range(MAX_STRIKES)] == [1.0, 2.0, None]
    assert book.failed((0, 0), why(), 0.0) == 1.0


def test_a_success_clears_the_strikes() -> None:
    book = FailureBook(0.2, 600.0)
    book.failed((0, 0), why(), 0.0)
    book.succeeded((0, 0), 0.0)
    assert book.failed((0, 0), why(), 0.0) == 1.0


def test_the_share_counts_trajectories_of_several_prompts_and_not_attempts() -> None:
    book = FailureBook(0.2, 600.0)
    for index in range(8):
        book.succeeded((index, 0), 0.0)
    for _ in range(5):
        book.failed((8, 0), why(), 0.0)
        book.failed((9, 0), why(), 0.0)
    assert book.evaluate(1, 2, 0.0) is None, "2 of 10"
    book.failed((9, 1), why(), 0.0)
    decision = book.evaluate(1, 2, 0.0)
    assert decision is not None
    assert decision.reason.startswith(
        "3 of the last 11 trajectories failed ([task] max_failed_share = 0.2); the most frequent error (raised, 11"
        " times): Key"
    )


def test_one_prompt_alone_is_no_outage_and_leaves_the_window_when_given_up() -> None:
    book = FailureBook(0.2, 600.0)
    for sample in range(8):
        book.succeeded((0, sample), 0.0)
        book.failed((1, sample), why(), 0.0)
    assert book.evaluate(0, 8, 0.0) is None
    book.settled(1)
    book.failed((2, 0), why(), 0.0)
    assert book.evaluate(0, 1, 0.0) is None, "1 of 9"


def test_an_outage_is_seen_in_as_many_trajectories_as_are_open_however_many_went_well_before() -> None:
    for open_, failures in ((4, 4), (8, 4), (32, 7), (64, 13), (500, 13)):
        book = FailureBook(0.2, 600.0)
        for index in range(WINDOW):
            book.succeeded((index, 0), 0.0)
        for index in range(failures):
            assert book.evaluate(open_ - index, index, 0.0) is None
            book.failed((100 + index, 0), why(), 0.0)
        decision = book.evaluate(open_ - failures, failures, 0.0)
        assert decision is not None
        assert decision.action == "pause"


def test_time_in_which_the_leader_stood_still_is_no_pause() -> None:
    book = paused(10.0)
    book.discount(3600.0)
    assert book.evaluate(1, 1, 3605.0) is None
    assert not book.may_probe(3600.5)
    assert book.may_probe(3601.0)


def test_the_window_of_a_small_run_is_evaluated_when_every_open_trajectory_waits() -> None:
    book = FailureBook(0.2, 600.0)
    for sample in range(2):
        book.failed((0, sample), why(), 0.0)
    assert book.evaluate(2, 2, 0.0) is None
    decision = book.evaluate(0, 4, 0.0)
    assert decision is not None
    assert decision.action == "pause"


def test_failures_before_a_pause_do_not_count_against_a_trajectory() -> None:
    book = FailureBook(0.2, 600.0)
    for _ in range(MAX_STRIKES - 1):
        for index in range(ENOUGH):
            assert book.failed((index, 0), why(), 0.0) is not None
    assert book.evaluate(4, ENOUGH, 0.0) is not None
    book.succeeded((9, 0), 5.0)
    assert book.evaluate(4, ENOUGH, 5.0) is not None
    assert book.failed((0, 0), why(), 6.0) == 1.0


def test_probes_come_one_at_a_time_and_ever_later() -> None:
    book, now, began = paused(1e9), 0.0, []
    while len(began) < 9:
        now += 1.0
        if book.may_probe(now):
            key = (len(began), 0)
            began.append(now)
            book.probing(key)
            assert not book.may_probe(now + 1000.0)
            assert book.failed(key, why(), now) is not None
    assert [b - a for a, b in pairwise(began)] == [2.0, 4.0, 8.0, 16.0, 32.0, LONGEST_S, LONGEST_S, LONGEST_S]


def test_in_a_pause_only_probes_count_against_a_trajectory() -> None:
    book, now = paused(1e9), 0.0
    assert [book.failed((1, 0), why(), now) for _ in range(9)] == [1.0] * 9
    given_up = []
    for _ in range(MAX_STRIKES):
        now += 1000.0
        assert book.may_probe(now)
        book.probing((0, 0))
        given_up.append(book.failed((0, 0), why(), now) is None)
    assert given_up == [False, False, True]


def test_a_probe_or_what_was_sent_after_the_last_failure_resumes() -> None:
    for key, sent_at, resumed in (((0, 0), 0.0, True), ((5, 0), 0.0, False), ((5, 0), 1.0, True)):
        book = paused()
        book.probing((0, 0))
        book.succeeded(key, sent_at)
        decision = book.evaluate(1, 7, 9.0)
        assert (decision is not None and decision.action == "resume") is resumed
        assert bool(book.paused) is not resumed


def test_patience_is_of_the_pauses_together_until_a_sound_window_and_waits_for_the_probe() -> None:
    book, now = paused(10.0), 0.0
    for _ in range(2):
        now += 4.0
        book.probing((0, 0))
        book.succeeded((0, 0), now)
        assert book.evaluate(1, 1, now) is not None
        for index in range(ENOUGH):
            book.failed((index, 0), why(), now)
        decision = book.evaluate(1, 1, now)
        assert decision is not None
        assert decision.action == "pause"
    book.probing((0, 0))
    assert book.evaluate(1, 1, now + 4.0) is None, "12 s, but an attempt is on its way"
    book.failed((0, 0), why(), now + 4.0)
    assert book.evaluate(0, 0, now + 4.0) is None, "nothing is left to try: the trainers have the next move"
    decision = book.evaluate(1, 1, now + 4.0)
    assert decision is not None
    assert decision.action == "fail"
    assert "Admission was paused for 12 s ([task] failed_patience_s = 10)." in decision.reason
    assert book.evaluate(1, 1, now + 9.0) is None, "once"
    assert not book.may_probe(now + 1000.0)


def test_fast_failures_do_not_outweigh_attempts_that_run_well() -> None:
    book = FailureBook(0.2, 600.0)
    for sample in range(16):
        book.failed((sample % 2, sample), why(), 0.1)
    for index in range(2, 64):
        book.advanced((index, 0))
    book.advanced((0, 0))
    decision = book.evaluate(62, 16, 0.2)
    assert decision is not None, "16 of 78: what failed before does not count as well when it is tried again"
    assert decision.action == "pause"
    book.advanced((64, 0))
    book.advanced((65, 0))
    decision = book.evaluate(64, 16, 0.3)
    assert decision is not None, "16 of 80"
    assert decision.action == "resume"


def test_failures_among_many_attempts_that_advance_pause_nothing() -> None:
    book = FailureBook(0.2, 600.0)
    for sample in range(16):
        book.failed((sample % 2, sample), why(), 0.1)
    for index in range(2, 66):
        book.advanced((index, 0))
    assert book.evaluate(64, 16, 0.2) is None
    book.failed((2, 0), why(), 0.3)
    decision = book.evaluate(63, 17, 0.3)
    assert decision is not None, "nothing advanced since"
    assert decision.action == "pause"


def test_the_run_does_not_end_while_attempts_advance_and_probes_do_not_count_as_such() -> None:
    book, now = paused(100.0), 0.0
    for _ in range(20):
        now += 90.0
        book.advanced((50, 0))
        assert book.evaluate(1, 7, now) is None
    book.probing((60, 0))
    for _ in range(2):
        now += 55.0
        book.advanced((60, 0))
        book.evaluate(1, 7, now)
    book.failed((60, 0), why(), now)
    decision = book.evaluate(1, 7, now)
    assert decision is not None
    assert decision.action == "fail"


def test_time_in_which_no_probe_could_run_is_not_patience() -> None:
    book, now = paused(10.0), 0.0
    for _ in range(100):
        now += 1.0
        book.unable(now)
    assert book.evaluate(1, 7, now + 10.0) is None
    decision = book.evaluate(1, 7, now + 10.5)
    assert decision is not None
    assert "Admission was paused for 10 s" in decision.reason


def test_counts_are_by_kind_with_the_last_error() -> None:
    book = FailureBook(0.2, 600.0)
    for number in range(1000):
        book.failed((number, 0), why(f"error {number}"), 0.0)
    book.failed((0, 1), why("late", "timeout"), 0.0)
    assert book.counts == (("raised", 1000, "error 999"), ("timeout", 1, "late"))
    assert len(book._texts) <= 256


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 30), st.integers(0, 3)), max_size=200))
def test_no_history_breaks_the_book(history: list[tuple[bool, int, int]]) -> None:
    book, now = FailureBook(0.2, 30.0), 0.0
    over = False
    for well, index, sample in history:
        now += 0.5
        if book.may_probe(now):
            book.probing((index, sample))
        if well:
            book.succeeded((index, sample), now)
        else:
            delay = book.failed((index, sample), why(), now)
            assert delay is None or 1.0 <= delay <= LONGEST_S
        decision = book.evaluate(1, 1, now)
        over = over or (decision is not None and decision.action == "fail")
        assert not (over and book.may_probe(now + 1000.0) and book.paused)
        assert len(book._window) <= WINDOW


def test_probes_go_round_the_prompts_and_events_are_few() -> None:
    events: list[tuple[str, dict[str, object]]] = []
    attempts = Attempts(
        FailureBook(0.2, 1e9), lambda kind, **fields: events.append((kind, fields)), lambda reason: None
    )
    for number in range(30):
        assert attempts.failed(Trajectory(number // 10, number % 10, 0), why("long" * 1000), 0.0)
    assert attempts.evaluate(0, 0.0) == 0
    now, probed = 0.0, []
    for _ in range(4):
        now += 1000.0
        (probe,) = attempts.begin(now)
        assert attempts.begin(now + 1000.0) == []
        probed.append(probe.index)
        attempts.failed(probe, why(), now)
    assert probed == [0, 1, 2, 0]
    assert [kind for kind, _ in events] == ["trajectory_failed"] * 20 + ["admission_paused"] + ["trajectory_failed"] * 4
    assert len(str(events[0][1]["error"])) == 500
    assert [fields["unsaid"] for kind, fields in events if kind == "trajectory_failed"][19:22] == [0, 10, 0]
