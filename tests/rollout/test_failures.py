"""Failed attempts: back-off, pauses of admission, and the end of a run, by scripted and random histories."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra_hpc.rollout.attempts import Attempts
from libra_hpc.rollout.failures import ENOUGH, LONGEST_S, MAX_STRIKES, SOUND, AdmissionChange, Failure, FailureBook
from libra_hpc.rollout.trajectory import Trajectory

OPEN = dict.fromkeys(range(8), 2)
"""Eight prompts with two samples each."""


def why(error: str = "KeyError: 'x'", kind: str = "raised") -> Failure:
    return Failure(kind, "toy", "p", error)


def fail(book: FailureBook, prompts: range, now: float = 0.0, samples: int = 2) -> None:
    """Every sample of these prompts fails, until all of them fail again and again."""
    for index in prompts:
        for count in range(max(ENOUGH, samples)):
            book.failed((index, count % samples), why(), now)


def paused(patience_s: float = 600.0) -> FailureBook:
    book = FailureBook(0.2, patience_s)
    fail(book, range(8))
    assert decided(book.evaluate(OPEN, 8, 0.0), "pause")
    return book


def decided(decision: AdmissionChange | None, action: str) -> AdmissionChange:
    assert decision is not None
    assert decision.action == action
    return decision


@pytest.mark.parametrize(("proof", "strikes"), [(True, MAX_STRIKES), (False, 2 * MAX_STRIKES)])
def test_a_trajectory_is_given_up_sooner_once_what_began_later_went_well(proof: bool, strikes: int) -> None:
    book = FailureBook(0.2, 600.0)
    delays = [book.failed((0, 0), why(), 0.0)]
    if proof:
        book.succeeded((1, 0), 1.0)
    while delays[-1] is not None:
        delays.append(book.failed((0, 0), why(), 2.0))
    assert delays == [min(LONGEST_S, 2.0**count) for count in range(strikes - 1)] + [None]
    assert book.failed((0, 0), why(), 3.0) == 1.0


def test_a_success_clears_the_failures_of_its_prompt() -> None:
    book = FailureBook(0.2, 600.0)
    fail(book, range(3))
    for index in range(3):
        book.succeeded((index, 0), 0.0)
    assert book.evaluate(OPEN, 8, 0.0) is None
    assert book.failed((0, 0), why(), 0.0) == 1.0


def test_siblings_are_one_witness_and_one_that_still_runs_speaks_for_its_prompt() -> None:
    book = FailureBook(0.2, 600.0)
    book.succeeded((9, 0), 0.0)
    fail(book, range(1), samples=8)
    assert book.evaluate({**OPEN, 0: 8}, 8, 0.0) is None, "one prompt"
    fail(book, range(1, 3), samples=7)
    assert book.evaluate({**OPEN, 0: 8, 1: 8, 2: 8}, 8, 0.0) is None, "a sample of each may go well"
    book.failed((1, 7), why(), 0.0)
    decision = decided(book.evaluate({**OPEN, 0: 8, 1: 8, 2: 8}, 8, 0.0), "pause")
    assert decision.reason.startswith("2 of 8 open prompts fail again and again ([task] max_failed_share = 0.2); the")


@pytest.mark.parametrize(("open_", "failing", "pauses"), [(8, 1, False), (8, 2, True), (32, 6, False), (32, 7, True)])
def test_the_share_is_of_the_open_prompts(open_: int, failing: int, pauses: bool) -> None:
    book = FailureBook(0.2, 600.0)
    book.succeeded((99, 0), 0.0)
    fail(book, range(failing))
    assert (book.evaluate(dict.fromkeys(range(open_), 2), 8, 0.0) is not None) is pauses


def test_given_up_prompts_and_closed_ones_count_no_more() -> None:
    book = FailureBook(0.2, 600.0)
    fail(book, range(4))
    for index in range(3):
        book.settled(index)
    assert book.evaluate(dict.fromkeys(range(4, 12), 2), 8, 0.0) is None


def test_time_in_which_the_leader_stood_still_is_no_pause() -> None:
    book = paused(10.0)
    book.discount(3600.0)
    assert book.evaluate(OPEN, 1, 3605.0) is None
    assert not book.may_probe(3600.5)
    assert book.may_probe(3601.0)


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
    for _ in range(2 * MAX_STRIKES):
        now += 1000.0
        assert book.may_probe(now)
        book.probing((0, 0))
        given_up.append(book.failed((0, 0), why(), now) is None)
    assert given_up == [False] * (2 * MAX_STRIKES - 1) + [True]


@pytest.mark.parametrize(
    ("key", "sent_at", "resumes"), [((0, 0), 0.0, True), ((20, 0), 0.0, False), ((20, 0), 1.0, True)]
)
def test_a_probe_or_what_was_sent_in_the_pause_resumes(key: tuple[int, int], sent_at: float, resumes: bool) -> None:
    book = paused()
    book.probing((0, 0))
    book.succeeded(key, sent_at)
    assert (book.evaluate(OPEN, 7, 9.0) is not None) is resumes
    assert bool(book.paused) is not resumes


def test_a_success_elsewhere_names_the_prompts_and_takes_their_word_away() -> None:
    book = paused()
    book.succeeded((20, 0), 2.0)
    decision = decided(book.evaluate(OPEN, 8, 9.0), "resume")
    assert decision.reason == (
        "An attempt succeeded after a pause of 9 s. Failures are of prompts 0, 1, 2, 3, 4, 5, 6, 7 of the data order."
    )
    assert book.evaluate(OPEN, 8, 10.0) is None
    fail(book, range(30, 33))
    decided(book.evaluate({**OPEN, 30: 2, 31: 2, 32: 2}, 8, 11.0), "pause")


def test_patience_is_of_the_pauses_together_until_enough_successes_and_waits_for_the_probe() -> None:
    book, now = paused(10.0), 0.0
    for _ in range(2):
        now += 4.0
        book.probing((0, 0))
        book.succeeded((0, 0), now)
        decided(book.evaluate(OPEN, 1, now), "resume")
        fail(book, range(8), now)
        decided(book.evaluate(OPEN, 1, now), "pause")
    book.probing((0, 0))
    assert book.evaluate(OPEN, 1, now + 4.0) is None, "12 s, but an attempt is on its way"
    book.failed((0, 0), why(), now + 4.0)
    assert book.evaluate(OPEN, 0, now + 4.0) is None, "nothing is left to try: the trainers have the next move"
    decision = decided(book.evaluate(OPEN, 1, now + 4.0), "fail")
    assert "Admission was paused for 12 s ([task] failed_patience_s = 10)." in decision.reason
    assert book.evaluate(OPEN, 1, now + 9.0) is None, "once"
    assert not book.may_probe(now + 1000.0)


def test_enough_successes_end_the_count_of_patience() -> None:
    book = paused(10.0)
    book.probing((0, 0))
    for number in range(SOUND):
        book.succeeded((0, number), 8.0)
    decided(book.evaluate(OPEN, 1, 8.0), "resume")
    fail(book, range(8), 9.0)
    decided(book.evaluate(OPEN, 1, 9.0), "pause")
    assert book.evaluate(OPEN, 1, 17.0) is None


def test_the_run_does_not_end_while_attempts_advance_and_probes_do_not_count_as_such() -> None:
    book, now = paused(100.0), 0.0
    for _ in range(20):
        now += 90.0
        book.advanced((50, 0))
        assert book.evaluate(OPEN, 7, now) is None
    book.probing((60, 0))
    for _ in range(2):
        now += 55.0
        book.advanced((60, 0))
        book.evaluate(OPEN, 7, now)
    book.failed((60, 0), why(), now)
    decided(book.evaluate(OPEN, 7, now), "fail")


def test_time_in_which_no_probe_could_run_is_not_patience() -> None:
    book, now = paused(10.0), 0.0
    for _ in range(100):
        now += 1.0
        book.unable(now)
    assert book.evaluate(OPEN, 7, now + 10.0) is None
    assert "Admission was paused for 10 s" in decided(book.evaluate(OPEN, 7, now + 10.5), "fail").reason


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
        decision = book.evaluate(dict.fromkeys(range(31), 4), 1, now)
        over = over or (decision is not None and decision.action == "fail")
        assert not (over and book.may_probe(now + 1000.0) and book.paused)


def test_probes_alternate_between_prompts_that_fail_and_fresh_ones_and_events_are_few() -> None:
    events: list[tuple[str, dict[str, object]]] = []
    attempts = Attempts(
        FailureBook(0.2, 1e9), lambda kind, **fields: events.append((kind, fields)), lambda reason: None
    )
    for number in range(30):
        assert attempts.failed(Trajectory(number // 10, number % 10, 0), why("long" * 1000), 0.0)
    assert attempts.evaluate([], 0.0) == 0
    assert attempts.evaluate([], 1000.0) == 1, "a fresh prompt for the first probe"
    now, probed = 0.0, []
    for count in range(6):
        now += 1000.0
        if count < 3:
            attempts.hold(Trajectory(50 + count, 0, 0), now)
        attempts.evaluate([], now)
        (probe,) = attempts.begin(now)
        assert attempts.begin(now + 1000.0) == []
        probed.append(probe.index)
        attempts.failed(probe, why(), now)
    assert probed[:4] == [50, 0, 51, 1]
    assert [kind for kind, _ in events][:21] == ["trajectory_failed"] * 20 + ["admission_paused"]
    assert len(str(events[0][1]["error"])) == 500
    assert [fields["unsaid"] for kind, fields in events if kind == "trajectory_failed"][19:22] == [0, 10, 0]
