"""Failed attempts: back-off, pauses of admission, and the end of a run, by scripted and random histories."""

from __future__ import annotations

from itertools import pairwise

import pytest

from libra_hpc.rollout.attempts import Attempts
from libra_hpc.rollout.failures import AGAIN, LONGEST_S, TRIES, AdmissionChange, FailureBook
from libra_hpc.rollout.trajectory import Trajectory

WHY = ("raised", "KeyError: 'x'")


def fail(book: FailureBook, prompts: range, now: float = 0.0, samples: int = 2) -> None:
    """Every sample of these prompts fails again."""
    for index in prompts:
        for sample in range(samples):
            for _ in range(AGAIN):
                book.failed((index, sample), *WHY, now)


def paused(patience_s: float = 600.0) -> FailureBook:
    book = FailureBook(0.2, patience_s)
    fail(book, range(8))
    assert decided(book.evaluate(8, 8, 0.0), "pause")
    return book


def decided(decision: AdmissionChange | None, action: str) -> AdmissionChange:
    assert decision is not None
    assert decision.action == action
    return decision


@pytest.mark.parametrize(("proof", "alone", "tries"), [(True, False, TRIES), (False, True, TRIES), (False, False, 6)])
def test_a_trajectory_is_given_up_sooner_where_the_failures_are_its_own(proof: bool, alone: bool, tries: int) -> None:
    book = FailureBook(0.2, 600.0)
    if not alone:
        book.failed((1, 0), *WHY, 0.0)
    delays = [book.failed((0, 0), *WHY, 0.0)]
    if proof:
        book.succeeded((1, 0), 1.0)
    while delays[-1] is not None:
        delays.append(book.failed((0, 0), *WHY, 2.0))
    assert delays == [min(LONGEST_S, 2.0**count) for count in range(tries - 1)] + [None]
    assert book.failed((0, 0), *WHY, 3.0) == 1.0


def test_a_success_after_the_failures_takes_their_word_away_and_one_sent_before_does_not() -> None:
    book = FailureBook(0.2, 600.0)
    fail(book, range(3), 5.0)
    book.succeeded((9, 0), 6.0)
    assert book.evaluate(8, 8, 7.0) is None
    fail(book, range(3, 6), 8.0)
    book.succeeded((9, 1), 7.0)
    decided(book.evaluate(8, 8, 9.0), "pause")


@pytest.mark.parametrize(
    ("open_", "prompts", "samples", "pauses"),
    [(16, 1, 8, False), (20, 2, 2, False), (19, 2, 2, True), (64, 6, 2, False), (64, 7, 2, True)],
)
def test_a_share_of_the_open_trajectories_pauses_but_for_one_prompt(
    open_: int, prompts: int, samples: int, pauses: bool
) -> None:
    book = FailureBook(0.2, 600.0)
    fail(book, range(prompts), samples=samples)
    decision = book.evaluate(open_ - 8, 8, 0.0)
    assert (decision is not None) is pauses
    if decision is not None:
        share = f"{prompts * samples} of {open_} open trajectories fail again and again ([task] max_failed_share = 0.2)"
        assert decision.reason.startswith(f"{share}; the most frequent error (raised, {2 * prompts * samples} times)")


def test_prompts_that_are_given_up_one_after_another_are_not_alone() -> None:
    book = FailureBook(0.2, 600.0)
    assert [book.failed((0, 0), *WHY, 0.0) for _ in range(TRIES)][-1] is None
    fail(book, range(1, 2))
    decided(book.evaluate(0, 2, 0.0), "pause")


def test_time_in_which_the_leader_stood_still_is_no_pause() -> None:
    book = paused(10.0)
    book.discount(3600.0)
    assert book.evaluate(0, 1, 3605.0) is None
    assert not book.may_probe(3600.5)
    assert book.may_probe(3601.0)


def test_probes_come_one_at_a_time_and_ever_later_and_nothing_is_given_up() -> None:
    book, now, began = paused(1e9), 0.0, []
    while len(began) < 9:
        now += 1.0
        assert book.failed((1, 0), *WHY, now) is not None
        if book.may_probe(now):
            began.append(now)
            book.probe = (0, 0)
            assert not book.may_probe(now + 1000.0)
            assert book.failed((0, 0), *WHY, now) is not None
    assert [b - a for a, b in pairwise(began)] == [2.0, 4.0, 8.0, 16.0, 32.0, LONGEST_S, LONGEST_S, LONGEST_S]


@pytest.mark.parametrize(("sent_at", "resumes"), [(0.0, False), (1.0, True)])
def test_a_success_of_what_was_sent_in_the_pause_resumes(sent_at: float, resumes: bool) -> None:
    book = paused()
    book.succeeded((20, 0), sent_at)
    decision = book.evaluate(0, 7, 9.0)
    assert (decision is not None) is resumes is not bool(book.paused)
    if decision is not None:
        assert decision == AdmissionChange("resume", "An attempt succeeded after a pause of 9 s.")
        assert book.evaluate(8, 8, 10.0) is None
        assert book.failed((0, 0), *WHY, 11.0) is None, "its own fault, as the success has shown"


def test_patience_waits_for_the_probe_and_for_something_to_try_and_ends_the_run_once() -> None:
    book = paused(10.0)
    book.probe = (0, 0)
    assert book.evaluate(0, 1, 12.0) is None, "an attempt is on its way"
    book.failed((0, 0), *WHY, 12.0)
    assert book.evaluate(0, 0, 12.0) is None, "nothing is left to try: the trainers have the next move"
    decision = decided(book.evaluate(0, 1, 12.0), "fail")
    assert "Admission was paused for 12 s ([task] failed_patience_s = 10)." in decision.reason
    assert book.evaluate(0, 1, 19.0) is None, "once"
    assert not book.may_probe(1000.0)


def test_the_run_does_not_end_while_attempts_advance_and_probes_do_not_count_as_such() -> None:
    book, now = paused(100.0), 0.0
    for _ in range(20):
        now += 90.0
        book.advanced((50, 0))
        assert book.evaluate(1, 7, now) is None
    book.probe = (60, 0)
    for _ in range(2):
        now += 55.0
        book.advanced((60, 0))
        book.evaluate(1, 7, now)
    book.failed((60, 0), *WHY, now)
    decided(book.evaluate(0, 7, now), "fail")


def test_probes_are_of_fresh_prompts_first_and_events_are_few() -> None:
    events: list[tuple[str, dict[str, object]]] = []
    attempts = Attempts(
        FailureBook(0.2, 1e9), lambda kind, **fields: events.append((kind, fields)), lambda reason: None
    )
    for attempt in range(2):
        for number in range(15):
            one = Trajectory(index=number // 5, sample=number % 5, attempt=attempt)
            one.error = "long" * 1000
            assert attempts.failed(one, "raised", 0.0)
    assert attempts.evaluate(0, 0.0) == 0
    assert attempts.evaluate(0, 1000.0) == 1, "a fresh prompt for the first probe"
    now, probed = 1000.0, []
    attempts.hold(Trajectory(index=50, sample=0), now)
    assert attempts.evaluate(0, now) == 0, "one is enough"
    for _ in range(3):
        now += 1000.0
        (probe,) = attempts.begin(now)
        assert attempts.begin(now + 1000.0) == []
        probed.append((probe.index, probe.attempt))
        attempts.failed(probe, "raised", now)
    assert probed == [(50, 0), (50, 1), (0, 2)]
    assert [kind for kind, _ in events][:21] == ["trajectory_failed"] * 20 + ["admission_paused"]
    assert len(str(events[0][1]["error"])) == 500
    assert [fields["unsaid"] for kind, fields in events if kind == "trajectory_failed"][19:22] == [0, 10, 0]
