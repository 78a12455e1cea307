"""The remaining-work estimator: prior, siblings, work done, room."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from libra_hpc.policies.scheduling.cmlfq.remaining_work import MAX_PROMPTS, PRIOR_TOKENS, RemainingWorkEstimator

TOTALS = st.lists(st.integers(200, 60_000), min_size=1, max_size=12)


def left(estimator: RemainingWorkEstimator, prompt: str, attained: int = 0, task: str = "task") -> float:
    return estimator.cursor(prompt, task).advance(attained, attained)


def learned(*totals: int, prompt: str = "p") -> RemainingWorkEstimator:
    """An estimator that has seen trajectories of these lengths, of one prompt."""
    estimator = RemainingWorkEstimator()
    learn(estimator, prompt, *totals)
    return estimator


def learn(estimator: RemainingWorkEstimator, prompt: str, *totals: int, task: str = "task") -> None:
    for total in totals:
        estimator.finish(estimator.cursor(prompt, task), total)


def test_nothing_learned_gives_the_prior_whatever_the_prompt() -> None:
    assert left(RemainingWorkEstimator(), "p") == left(RemainingWorkEstimator(), "q") == PRIOR_TOKENS


@given(TOTALS)
def test_the_estimate_falls_as_work_is_done_up_to_half_of_the_mean_and_then_grows(totals: list[int]) -> None:
    estimator = learned(*totals)
    total = left(estimator, "p")
    early = [left(estimator, "p", int(share * total)) for share in (0.0, 0.1, 0.2, 0.3, 0.4)]
    assert early == sorted(early, reverse=True)
    late = [left(estimator, "p", int(times * total)) for times in (1.0, 2.0, 4.0, 8.0)]
    assert late == sorted(late), "what has outlived its mean goes on for as long again"


@given(TOTALS, st.integers(200, 60_000))
def test_siblings_move_the_estimate_towards_their_length(totals: list[int], length: int) -> None:
    estimator = learned(*totals, prompt="others")
    gaps = [abs(left(estimator, "p") - length)]
    for _ in range(6):
        learn(estimator, "p", length)
        gaps.append(abs(left(estimator, "p") - length))
    assert gaps == sorted(gaps, reverse=True)


def test_prompts_and_tasks_are_told_apart() -> None:
    estimator = learned(*[6000] * 8, prompt="long")
    learn(estimator, "short", *[400] * 8)
    assert left(estimator, "long") > 4 * left(estimator, "short")
    assert left(estimator, "short") < left(estimator, "new") < left(estimator, "long")
    learn(estimator, "o", *[100] * 50, task="other")
    assert left(estimator, "new") > 20 * left(estimator, "new2", task="other")
    assert left(estimator, "new3", task="unknown") == PRIOR_TOKENS


@given(st.integers(0, 50_000), st.integers(0, 90_000), st.integers(1, 50_000))
def test_no_more_is_left_than_the_context_has_room_for(attained: int, tools: int, room: int) -> None:
    cursor = learned(*[20_000] * 8).cursor("p", "task")
    cursor.advance(attained, attained + tools, float(room))
    assert 0.0 < cursor.left <= cursor.reach <= room


def test_old_evidence_fades_as_lengths_grow() -> None:
    estimator = learned(*[500] * 4096, prompt="old")
    learn(estimator, "young", *[5000] * 4096)
    assert 3000 < left(estimator, "new") < 4000, "a mean of all would be 2750"


def test_the_oldest_prompts_are_dropped() -> None:
    estimator = learned(9000, 9000, prompt="p0")
    for i in range(1, MAX_PROMPTS):
        estimator.cursor(f"p{i}", "other")
    assert left(estimator, "p0", task="new") > 2 * PRIOR_TOKENS, "it started last now"
    estimator.cursor("one more", "other")
    assert left(estimator, "p0", task="new") > 2 * PRIOR_TOKENS
    for i in range(MAX_PROMPTS):
        estimator.cursor(f"q{i}", "other")
    assert left(estimator, "p0", task="new") == PRIOR_TOKENS
