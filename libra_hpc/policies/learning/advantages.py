"""Advantages of a group by name: the rewards of a prompt's trajectories -> one number each.

A run file may name ``file.py:f``. Where all rewards are equal every advantage is 0, but for an ``f(rewards, turns)``,
which has the rewards of turns too. Instead of a number it may return a list for a trajectory, one for each turn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from inspect import signature
from math import sqrt
from typing import Any, Literal, NamedTuple

from libra_hpc.config.learn import ADVANTAGES
from libra_hpc.errors import UserError, invalid
from libra_hpc.user_file import load_function

STD_EPS = 1e-4
"""Bounds the advantages of a group of nearly equal rewards; rewards are of order one."""
EQUAL = 1e-6
"""Largest difference of equal rewards, absolute. Half or double: no other groups. Rewards are of order one, and float32
rounds their sums at 1e-7."""

Turns = Sequence[Sequence[float]]
"""For each trajectory of a group, the rewards of its turns."""
Advantage = Callable[[Sequence[float], Turns], Sequence[float | list[float]]]


def all_equal(rewards: Sequence[float]) -> bool:
    """Whether rewards differ by no more than rounding, so that they teach nothing; true without any."""
    return not rewards or max(rewards) - min(rewards) <= EQUAL


def mean_and_std(values: Sequence[float]) -> tuple[float, float]:
    """Return mean and standard deviation of a non-empty sequence, as the whole population."""
    mean = sum(values) / len(values)
    return mean, sqrt(sum((value - mean) ** 2 for value in values) / len(values))


def group_std(rewards: Sequence[float]) -> list[float]:
    """(r - mean) / (std + `STD_EPS`), GRPO: arXiv 2402.03300, section 4.1.2."""
    mean, std = mean_and_std(rewards)
    return [(r - mean) / (std + STD_EPS) for r in rewards]


def group_mean(rewards: Sequence[float]) -> list[float]:
    """R - mean, Dr. GRPO: easy and hard prompts are not scaled up (arXiv 2503.20783, section 3.1)."""
    mean, _ = mean_and_std(rewards)
    return [r - mean for r in rewards]


def rloo(rewards: Sequence[float]) -> list[float]:
    """R - mean of the others, an unbiased baseline (arXiv 2402.14740, equation 7); one alone has none."""
    scale = len(rewards) / max(1, len(rewards) - 1)
    return [scale * value for value in group_mean(rewards)]


def no_advantage(rewards: Sequence[float]) -> list[float]:
    """Rewards are recorded alone: a KL term is all that is trained, with a teacher on-policy distillation."""
    return [0.0] * len(rewards)


_NAMED = dict(zip(ADVANTAGES, (group_std, group_mean, rloo, no_advantage), strict=True))


def advantage_named(name: str) -> Advantage:
    """Raises `UserError` for a name that is neither of `ADVANTAGES` nor a function of a file."""
    found: Any = _NAMED[name] if name in _NAMED else load_function("algorithm.advantage", name, ADVANTAGES)
    by_turn = len(signature(found).parameters) > 1

    def checked(rewards: Sequence[float], turns: Turns) -> list[float | list[float]]:
        if all_equal(rewards) and not by_turn:
            return [0.0] * len(rewards)
        values = list(found(list(rewards), [list(own) for own in turns]) if by_turn else found(list(rewards)))
        if len(values) != len(rewards) or not all(map(_fits, values, turns)):
            raise ValueError(f"{name} made {values} of the rewards {list(rewards)}: one finite number each is needed")
        return [list(map(float, value)) if isinstance(value, Sequence) else float(value) for value in values]

    return checked


def _fits(value: float | Sequence[float], turns: Sequence[float]) -> bool:
    """Whether a trajectory's advantage is a finite number, or one for each turn."""
    if isinstance(value, Sequence):
        return len(value) == len(turns) and all(map(math.isfinite, value))
    return math.isfinite(value)


def try_advantage(name: str) -> None:
    """Call it once on made-up rewards of a group; raises `UserError` for what it raises or returns."""
    try:
        advantage_named(name)([0.0, 1.0, 0.25], [[0.0], [0.5, 0.0], [0.0, 0.5, 0.0]])
    except UserError:
        raise
    except BaseException as error:
        raise invalid("algorithm.advantage", name, f"it fails for a group ({type(error).__name__}: {error})") from error


class Refill(NamedTuple):
    """Which groups others replace before a batch is complete: dynamic sampling (DAPO, arXiv 2503.14476, 3.2)."""

    most: int = 0
    """Groups replaced for one batch; 0: none."""

    def replaces(self, rewards: Sequence[float], replaced: int = 0) -> bool:
        """Whether a group goes, after ``replaced`` others of its batch.

        ``rewards``: of the trajectories that count, before `LengthRules`. A length must not teach where no answer does.
        """
        return replaced < self.most and all_equal(rewards)


class LengthRules(NamedTuple):
    """What long trajectories cost."""

    truncated: Literal["score", "zero", "mask"] = "score"
    soft: int = 0
    longest: int = 1
    """Tokens of a full context, over the last ``soft`` of which the reward falls."""

    def shaped(self, reward: float, tokens: int, truncated: bool) -> float | None:
        """The reward that counts for a context of ``tokens``; None: the trajectory does not (arXiv 2503.14476, 3.4)."""
        if truncated and self.truncated == "mask":
            return None
        over = (tokens - self.longest + self.soft) / self.soft if self.soft else 0.0
        return (0.0 if truncated and self.truncated == "zero" else reward) - min(1.0, max(0.0, over))
