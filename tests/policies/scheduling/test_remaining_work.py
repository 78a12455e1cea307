"""The remaining-work estimator: prior, siblings, work done, tool outcomes, room."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra_hpc.policies.scheduling.cmlfq.remaining_work import PRIOR_TOKENS, RemainingWorkEstimator
from libra_hpc.protocol.env import Signal

from .boards import ERROR, MISS, OK, finished

TOTALS = st.lists(st.integers(200, 60_000), min_size=1, max_size=12)


def signal(outcome: str = "ok", tool: str = "run", **more: Any) -> Signal:
    return Signal(tool, **{"outcome": outcome, "payload_tokens": 5, "seconds": 0.1, **more})


def left(
    estimator: RemainingWorkEstimator, prompt: str, attained: int = 0, *signals: Signal, task: str = "task"
) -> float:
    return estimator.advance(estimator.cursor(prompt, task), signals, attained)


def learned(*totals: int, prompt: str = "p", **more: Any) -> RemainingWorkEstimator:
    """An estimator that has seen trajectories of these lengths, of one prompt."""
    estimator = RemainingWorkEstimator()
    for i, total in enumerate(totals):
        estimator.insert(finished(total, prompt, f"{prompt}{i}", **more))
    return estimator


def test_nothing_learned_gives_the_prior_whatever_the_prompt_and_the_outcome() -> None:
    estimator = RemainingWorkEstimator()
    assert left(estimator, "p") == PRIOR_TOKENS
    assert left(estimator, "q", 0, OK, ERROR) == PRIOR_TOKENS
    assert len(estimator) == 2 + 2


@given(TOTALS)
def test_the_estimate_falls_as_work_is_done_up_to_half_of_the_mean_and_then_grows(totals: list[int]) -> None:
    estimator = learned(*totals)
    total = left(estimator, "p")
    early = [left(estimator, "p", int(share * total)) for share in (0.0, 0.1, 0.2, 0.3, 0.4)]
    assert early == sorted(early, reverse=True)
    late = [left(learned(*totals), "p", int(times * total)) for times in (1.0, 2.0, 4.0, 8.0)]
    assert late == sorted(late), "what has outlived its mean goes on for as long again"


@given(TOTALS, st.integers(200, 60_000))
def test_siblings_move_the_estimate_towards_their_length(totals: list[int], length: int) -> None:
    estimator = learned(*totals, prompt="others")
    gaps = [abs(left(estimator, "p") - length)]
    for i in range(6):
        estimator.insert(finished(length, "p", f"p{i}"))
        gaps.append(abs(left(estimator, "p") - length))
    assert gaps == sorted(gaps, reverse=True)


def test_prompts_and_tasks_are_told_apart() -> None:
    estimator = learned(*[6000] * 8, prompt="long")
    for i in range(8):
        estimator.insert(finished(400, "short", f"s{i}"))
    assert left(estimator, "long") > 4 * left(estimator, "short")
    assert left(estimator, "short") < left(estimator, "new") < left(estimator, "long")
    for i in range(50):
        estimator.insert(finished(100, f"b{i}", f"o{i}", task="other"))
    assert left(estimator, "new") > 20 * left(estimator, "new2", task="other")
    assert left(estimator, "new3", task="unknown") == PRIOR_TOKENS


def test_a_running_sibling_that_outlives_the_others_lengthens_its_group_until_it_is_aborted() -> None:
    estimator = learned(*[500] * 8, prompt="others")
    before, running = left(estimator, "new"), estimator.cursor("new", "task")
    estimator.advance(running, (), 20_000)
    assert left(estimator, "new") > 3 * before
    assert left(estimator, "unrelated") > before, "the first to end are short"
    assert running.siblings == 0, "its own work does not count as a sibling's"
    assert running.total == running.mean
    running.count(0.0)
    assert left(estimator, "new") == pytest.approx(before)


def outcomes(informative: bool, seed: int = 3) -> RemainingWorkEstimator:
    """600 trajectories with one tool call; half of them go on for long after it."""
    rng, estimator = random.Random(seed), RemainingWorkEstimator()
    for i in range(600):
        long = rng.random() < 0.5
        failed = long if informative else rng.random() < 0.5
        total = 200 + int((5000 if long else 200) * rng.lognormvariate(0.0, 0.3))
        estimator.insert(finished(total, f"p{i}", f"t{i}", signals=(ERROR if failed else OK,), at=(200,)))
    return estimator


def test_an_outcome_that_preceded_long_rests_raises_the_estimate_and_one_that_says_nothing_does_not() -> None:
    estimator, noise = outcomes(True), outcomes(False)
    assert left(estimator, "new", 200, ERROR) > 5.0 * left(estimator, "new", 200, OK)
    assert left(estimator, "new", 200, ERROR) > left(estimator, "new", 200) > left(estimator, "new", 200, OK)
    assert left(noise, "new", 200, ERROR) == pytest.approx(left(noise, "new", 200, OK), rel=0.2)


def test_one_outcome_moves_little_and_the_last_one_counts() -> None:
    estimator = learned(*[1000] * 20)
    estimator.insert(finished(30_000, "x", "x", signals=(MISS,), at=(100,)))
    once = estimator.cursor("p", "task")
    estimator.advance(once, (MISS,), 100)
    assert 1.5 < once.factor < 5.0, "30 times as long as expected"
    estimator.advance(once, (MISS, OK), 200)
    assert once.factor == 1.0


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        (signal("ok", exit_code=1), signal("error"), True),
        (signal("ok", exit_code=0), signal("ok"), True),
        (signal("timeout", exit_code=124), signal("error"), False),
        (signal(tool="a"), signal(tool="b"), False),
        (signal(passed=5, failed=0), signal(passed=0, failed=5), False),
        (signal(passed=0, failed=5), signal(passed=0, failed=6), True),
        (signal(passed=3, failed=2), signal(), False),
    ],
)
def test_outcomes_are_told_apart_by_tool_class_and_failing_tests(first: Signal, second: Signal, same: bool) -> None:
    estimator = RemainingWorkEstimator()
    for i in range(40):
        estimator.insert(finished(9000, f"p{i}", f"t{i}", signals=(first,), at=(100,)))
    assert (left(estimator, "new", 100, first) == left(estimator, "new", 100, second)) == same


def test_a_cursor_equals_a_walk_from_the_start() -> None:
    signals = (OK, ERROR, ERROR, OK)
    stepwise = (estimator := outcomes(True)).cursor("new", "task")
    for i in range(1, 5):
        estimator.advance(stepwise, signals[:i], 100 * i)
    assert stepwise.left == pytest.approx(left(outcomes(True), "new", 400, *signals))


def test_a_look_into_a_running_turn_changes_nothing() -> None:
    estimator = outcomes(True)
    cursor = estimator.cursor("new", "task")
    before = estimator.advance(cursor, (OK,), 200)
    assert estimator.peek(cursor, 200).left == before
    assert estimator.peek(cursor, 30_000).left > before
    assert (cursor.left, estimator.advance(cursor, (OK,), 200)) == (before, before)


@given(st.integers(0, 50_000), st.integers(1, 50_000))
def test_no_more_is_left_than_the_context_has_room_for(attained: int, room: int) -> None:
    estimator = learned(*[20_000] * 8)
    cursor = estimator.cursor("p", "task")
    estimator.advance(cursor, (signal(payload_tokens=3000),), attained, float(room))
    assert 0.0 < cursor.left <= cursor.reach <= room


def test_evidence_halves_with_weight_versions() -> None:
    estimator = learned(500, 500, 500, 500)
    assert estimator.cursor("p", "task").prompt.count == 4.0
    estimator.insert(finished(500, "p", "later", version=16))
    assert estimator.cursor("p", "task").prompt.count == pytest.approx(3.0)


def test_prompts_and_outcomes_are_bounded() -> None:
    estimator = RemainingWorkEstimator(max_keys=20)
    for i in range(100):
        estimator.insert(finished(900, f"p{i}", f"t{i}", signals=(signal(tool=f"tool{i}"),), at=(100,)))
    assert len(estimator) == 20 + 20
    assert left(estimator, "new", 100, signal(tool="one more")) > 0.0
