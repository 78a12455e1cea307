"""Guards of learning: they see a policy that breaks, and stay quiet while one learns."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest

from libra_hpc.policies.learning.guards import HOLD, LEAST, WINDOW, GuardDecision, LearningGuards

Reward = Callable[[int], float]


def play(
    reward: Reward, steps: int = 400, *, seed: int = 0, noise: float = 0.08, action: str = "pause", **others: Reward
) -> list[tuple[int, GuardDecision]]:
    """Decisions of a run, by step; ``others``: columns that are not as usual."""
    draw, guards, found = random.Random(seed), LearningGuards(action), []  # type: ignore[arg-type]
    for step in range(1, steps + 1):
        line = {
            "step": step,
            "reward": reward(step) + draw.gauss(0.0, noise),
            "reward_std": 0.4,
            "entropy": 0.5 + draw.gauss(0.0, 0.05),
            "logprob_gap": 0.02 + draw.random() * 0.01,
            "equal_groups": 0.3,
            **{name: value(step) for name, value in others.items()},
        }
        if (decision := guards.observe(line)) is not None:
            found.append((step, decision))
    return found


def learning(step: int) -> float:
    return 1.0 - 0.9 * math.exp(-step / 80.0)


def falls_at(step: int, to: float = -0.2, over: int = 30) -> Reward:
    def reward(now: int) -> float:
        share = min(1.0, max(0.0, (now - step) / over))
        return (1.0 - share) * learning(now) + share * to

    return reward


def with_no_gradient(step: int) -> float:
    """Share of equal groups of a policy that breaks at step 200: in the end all samples fail alike."""
    return 0.3 if step < 220 else 1.0


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    "reward",
    [
        pytest.param(lambda step: 0.3, id="flat"),
        pytest.param(learning, id="learning"),
        pytest.param(lambda step: 0.6 + 0.05 * math.sin(step / 15.0), id="a mixture of tasks"),
        pytest.param(lambda step: learning(step) - (0.15 if step > 200 else 0.0), id="harder data"),
    ],
)
def test_a_run_that_learns_is_left_alone(reward: Reward, seed: int) -> None:
    assert play(reward, steps=1000, seed=seed) == []


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    "reward",
    [
        pytest.param(lambda step: learning(step) - (0.6 if step > 200 else 0.0), id="much harder data"),
        pytest.param(lambda step: 0.9 - 0.8 * min(1.0, step / 500.0), id="sorted by difficulty"),
        pytest.param(lambda step: learning(step) if step % 200 < 100 else 0.1, id="two tasks in turn"),
        pytest.param(
            lambda step: learning(step) * (1.0 if step < 300 else math.exp(-(step - 300) / 200.0)), id="decay"
        ),
    ],
)
def test_a_lower_reward_alone_is_a_notice(reward: Reward, seed: int) -> None:
    actions = {decision.action for _, decision in play(reward, steps=1000, seed=seed)}
    assert actions <= {"notice"}


@pytest.mark.parametrize("seed", range(5))
def test_a_solved_task_is_left_alone_whatever_fails_now_and_then(seed: int) -> None:
    draw = random.Random(seed)
    failed = [draw.random() < (0.5 if step > 300 else 0.02) for step in range(1001)]
    found = play(
        lambda step: 1.0 - failed[step] * 2.0 / 64.0,
        steps=1000,
        noise=0.0,
        reward_std=lambda step: failed[step] * 0.17,
        equal_groups=lambda step: 1.0 - failed[step] / 16.0,
    )
    assert {decision.action for _, decision in found} == {"notice"}
    assert all("nothing is learned" in decision.reason for _, decision in found)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("action", ["pause", "stop"])
def test_a_policy_that_breaks_is_noticed_and_then_acted_on(action: str, seed: int) -> None:
    found = play(falls_at(200), seed=seed, action=action, equal_groups=with_no_gradient)
    assert [decision.action for _, decision in found[:3]] == ["notice", "notice", action]
    (first, fell), (second, collapsed), (then, act) = found[:3]
    assert "the reward fell from" in fell.reason
    assert "have equal rewards" in collapsed.reason
    assert 200 < first <= 200 + 30 + WINDOW
    assert then == second + HOLD
    assert 180 < act.good_step <= 210
    assert fell.good_step == act.good_step, "that checkpoint is retained from the first notice on"


@pytest.mark.parametrize(
    ("reward", "columns", "actions", "reason"),
    [
        pytest.param(
            falls_at(200),
            {"entropy": lambda step: 0.5 if step < 210 else 3.0},
            {"notice", "pause"},
            "the reward fell from",
            id="an entropy that leaves its range as the reward falls",
        ),
        pytest.param(
            falls_at(200),
            {"action": "notice", "equal_groups": with_no_gradient},
            {"notice"},
            "the reward fell from",
            id="nothing more is asked for",
        ),
        pytest.param(
            lambda step: learning(step) - (1.0 if 200 < step <= 206 else 0.0),
            {"equal_groups": lambda step: 1.0 if 200 < step <= 206 else 0.3},
            {"notice"},
            "the reward fell from",
            id="a dip that passes",
        ),
        pytest.param(
            lambda step: 0.7 if step < 200 else 0.45,
            {"noise": 0.03, "equal_groups": lambda step: 0.3 if step < 200 else 1.0},
            {"notice", "pause"},
            "",
            id="groups without gradient below the best reward",
        ),
        pytest.param(
            learning, {"entropy": lambda step: 0.5 if step < 200 else 0.02}, {"notice"}, "entropy", id="entropy alone"
        ),
        pytest.param(
            learning,
            {"logprob_gap": lambda step: 0.02 if step < 200 else 0.6},
            {"notice", "pause"},
            "log-probabilities differ",
            id="engines that disagree with the trainer",
        ),
        pytest.param(
            learning,
            {"logprob_gap": lambda step: 0.6},
            {"notice", "pause"},
            "log-probabilities differ",
            id="engines that are wrong from the first step on",
        ),
        pytest.param(
            lambda step: 1.0,
            {"noise": 0.0, "equal_groups": lambda step: 1.0},
            {"notice"},
            "nothing is learned",
            id="groups without gradient while the task is solved",
        ),
    ],
)
def test_what_is_acted_on_and_what_is_a_notice_alone(
    reward: Reward, columns: Any, actions: set[str], reason: str
) -> None:
    found = [decision for _, decision in play(reward, **columns)]
    assert {decision.action for decision in found} == actions
    assert reason in found[0].reason


def test_who_resumes_a_paused_run_accepts_where_it_is_and_a_second_break_counts_again() -> None:
    found = play(
        lambda step: falls_at(200 if step < 400 else 700)(step),
        steps=900,
        equal_groups=lambda step: 1.0 if 220 <= step < 400 or step >= 720 else 0.3,
    )
    first, second = (step for step, decision in found if decision.action == "pause")
    assert first < 400 < 720 < second


def test_the_good_step_is_let_go_with_the_guard() -> None:
    guards = LearningGuards("pause")
    for step in range(1, 300):
        low = 100 < step <= 120
        guards.observe({"step": step, "reward": 0.1 if low else 0.9 + 0.01 * (step % 2), "reward_std": 0.3})
        if step == 120:
            assert 80 <= (guards.good_step or 0) <= 100
    assert guards.good_step is None


def test_missing_numbers_and_first_steps_are_not_judged() -> None:
    guards = LearningGuards("pause")
    lines = [{"step": step, "reward": None if step % 2 else 0.0} for step in range(1, 2 * LEAST)]
    assert all(guards.observe(line) is None for line in lines)


@pytest.mark.parametrize(
    ("fp8", "gap", "stale", "expected"),
    [
        (True, 0.08, 0, [(1, "stop")]),
        (True, 0.08, 1, [(1, "notice"), (1 + HOLD, "stop")]),
        (True, 0.04, 0, []),
        (False, 0.08, 0, []),
    ],
)
def test_a_gap_beside_caches_in_fp8_ends_a_run_at_once_where_no_sample_is_stale(
    fp8: bool, gap: float, stale: int, expected: list[tuple[int, str]]
) -> None:
    guards = LearningGuards("stop", fp8)
    usual = {"reward": 0.5, "reward_std": 0.5, "staleness_max": stale, "logprob_gap": gap}
    for step in range(1, 60):
        decision = guards.observe({"step": step, **usual})
        assert (decision is not None) is (bool(expected) and step == expected[0][0]), (step, decision)
        if decision is not None:
            assert decision.action == expected.pop(0)[1]
            assert "KV caches in FP8 the gap is 0.08 nats" in decision.reason
            assert decision.good_step == 0
            if decision.action == "stop":
                break
    assert not expected
