"""Advantages of a group against numbers by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pytest

from libra_hpc.config.learn import ADVANTAGES
from libra_hpc.policies.learning.advantages import STD_EPS, Advantage, LengthRules, Refill, advantage_named


def _of(advantage: Advantage, *rewards: float) -> Sequence[float | list[float]]:
    """Advantages of trajectories of one turn."""
    return advantage(rewards, [[0.0]] * len(rewards))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("group_std", [1.5 / (0.75**0.5 + STD_EPS), *[-0.5 / (0.75**0.5 + STD_EPS)] * 3]),
        ("group_mean", [1.5, -0.5, -0.5, -0.5]),
        ("rloo", [2.0, -2 / 3, -2 / 3, -2 / 3]),
    ],
)
def test_by_hand(name: str, expected: list[float]) -> None:
    assert _of(advantage_named(name), 2.0, 0.0, 0.0, 0.0) == pytest.approx(expected)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_a_group_of_equal_rewards_has_none(name: str) -> None:
    assert _of(advantage_named(name), 0.3, 0.3, 0.3) == [0.0, 0.0, 0.0]
    assert _of(advantage_named(name), 7.0) == [0.0]
    assert _of(advantage_named(name), 0.3, 0.1 + 0.2) == [0.0, 0.0], "rounding is no reward"


@pytest.mark.parametrize(
    ("rewards", "replaced", "goes"),
    [
        ([1.0, 1.0], 0, True),
        ([1.0, 0.0], 0, False),
        ([], 3, True),
        ([0.0, 0.0], 4, False),
        ([0.5], 3, True),
        ([0.3, 0.1 + 0.2], 0, True),
    ],
)
def test_groups_without_a_gradient_are_replaced_up_to_the_bound(
    rewards: list[float], replaced: int, goes: bool
) -> None:
    assert Refill(4).replaces(rewards, replaced) is goes
    assert not Refill().replaces(rewards, replaced)


def test_a_function_of_a_file_gives_one_number_for_each_reward(tmp_path: Path) -> None:
    file = tmp_path / "my.py"
    file.write_text("def best(rs): return [float(r == max(rs)) for r in rs]\ndef few(rewards): return [1]\n")
    assert _of(advantage_named(f"{file}:best"), 0.1, 0.9) == [0.0, 1.0]
    with pytest.raises(ValueError, match="one finite number each"):
        _of(advantage_named(f"{file}:few"), 0.1, 0.9)


def test_a_function_of_two_arguments_has_the_rewards_of_turns_also_of_equal_trajectories(tmp_path: Path) -> None:
    file = tmp_path / "my.py"
    sums = "def sums(rewards, turns): return [r + sum(own) for r, own in zip(rewards, turns)]"
    file.write_text(f"{sums}\ndef each(rewards, turns): return turns")
    rewards, turns = [1.0, 1.0], [[0.5, 0.0], [0.0]]
    assert advantage_named(f"{file}:sums")(rewards, turns) == [1.5, 1.0]
    assert advantage_named(f"{file}:each")(rewards, turns) == turns
    with pytest.raises(ValueError, match="one finite number each"):
        advantage_named(f"{file}:each")([1.0], [[0.5, math.inf]])


@pytest.mark.parametrize(
    ("rules", "tokens", "truncated", "counts"),
    [
        (LengthRules(), 100, True, 0.7),
        (LengthRules("zero"), 100, True, 0.0),
        (LengthRules("zero"), 100, False, 0.7),
        (LengthRules("mask"), 100, True, None),
        (LengthRules("score", 20, 100), 80, False, 0.7),
        (LengthRules("score", 20, 100), 85, False, 0.45),
        (LengthRules("score", 20, 100), 130, True, -0.3),
    ],
)
def test_what_long_trajectories_cost(rules: LengthRules, tokens: int, truncated: bool, counts: float | None) -> None:
    assert rules.shaped(0.7, tokens, truncated) == (None if counts is None else pytest.approx(counts))
