"""Guards of learning: they see a policy that breaks, and stay quiet while one learns."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from libra_hpc.policies.learning.guards import HOLD, LEAST, WINDOW, GuardDecision, LearningGuards

Reward = Callable[[int], float]


def play(
    reward: Reward, steps: int = 400, *, seed: int = 0, noise: float = 0.08, action: str = "pause", **others: Reward
) -> list[tuple[int, GuardDecision]]:
    """Decisions of a run, by step; ``others``: columns that are not as usual."""
    draw, guards, found = random.Random(seed), LearningGuards(action), []  # type: ignore[arg-type]
    for step in range(1, steps + 1):
        line = {"step": step, "reward": reward(step) + draw.gauss(0.0, noise), "reward_std": 0.4}
        line |= {
            "entropy": 0.5 + draw.gauss(0.0, 0.05),
            "logprob_gap": 0.02 + draw.random() * 0.01,
            "equal_groups": 0.3,
        }
        line |= {name: value(step) for name, value in others.items()}
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


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("action", ["pause", "stop"])
def test_a_fallen_reward_is_noticed_and_then_acted_on(action: str, seed: int) -> None:
    (first, notice), (then, act) = play(falls_at(200), seed=seed, action=action)
    assert (notice.action, act.action, then) == ("notice", action, first + HOLD)
    assert "the reward fell from" in notice.reason
    assert 200 < first <= 200 + 30 + WINDOW
    assert 150 < act.good_step <= 215


def test_notices_alone_where_nothing_more_is_asked_for() -> None:
    assert [decision.action for _, decision in play(falls_at(200), action="notice")] == ["notice"]


def test_a_dip_that_passes_is_a_notice_alone() -> None:
    def dip(step: int) -> float:
        return learning(step) - (1.0 if 200 < step <= 206 else 0.0)

    assert [decision.action for _, decision in play(dip)] == ["notice"]


def test_a_run_acts_once() -> None:
    assert sum(decision.action == "pause" for _, decision in play(falls_at(200))) == 1


def test_engines_that_disagree_with_the_trainer_are_acted_on() -> None:
    found = play(learning, logprob_gap=lambda step: 0.02 if step < 200 else 0.6)
    assert [decision.action for _, decision in found] == ["notice", "pause"]
    assert "log-probabilities differ" in found[0][1].reason


def test_groups_without_gradient_are_a_notice_while_the_task_is_solved() -> None:
    found = play(lambda step: 1.0, noise=0.0, equal_groups=lambda step: 1.0)
    assert [decision.action for _, decision in found] == ["notice"]
    assert "nothing is learned" in found[0][1].reason


def test_groups_without_gradient_below_the_best_reward_are_acted_on() -> None:
    def settled(step: int) -> float:
        return 0.7 if step < 200 else 0.45

    found = play(settled, noise=0.03, equal_groups=lambda step: 0.3 if step < 200 else 1.0)
    assert "pause" in [decision.action for _, decision in found]


def test_entropy_is_a_notice_alone() -> None:
    found = play(learning, entropy=lambda step: 0.5 if step < 200 else 0.02)
    assert [decision.action for _, decision in found] == ["notice"]


def test_missing_numbers_and_first_steps_are_not_judged() -> None:
    guards = LearningGuards("pause")
    lines = [{"step": step, "reward": None if step % 2 else 0.0} for step in range(1, 2 * LEAST)]
    assert all(guards.observe(line) is None for line in lines)
