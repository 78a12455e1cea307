"""Group-normalised advantages (GRPO, arXiv 2402.03300, section 4.1.2): (r - mean) / (std + `ADVANTAGE_EPS`)."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

ADVANTAGE_EPS = 1e-4
"""Bounds the advantages of a group of nearly equal rewards; rewards are of order one."""


def advantages(rewards: Sequence[float]) -> list[float]:
    """Advantage of every sample of one group (one prompt); exactly zero when all rewards are equal."""
    if not rewards or max(rewards) == min(rewards):
        return [0.0] * len(rewards)
    mean = sum(rewards) / len(rewards)
    std = sqrt(sum((r - mean) ** 2 for r in rewards) / len(rewards))
    return [(r - mean) / (std + ADVANTAGE_EPS) for r in rewards]
