"""Correction factors of the cost models: measured over predicted seconds, 1.0 where nothing was measured.

Every predicted time is a sum of terms, each multiplied by its factor. The models stay pure: the caller passes factors.
"""

from __future__ import annotations

import msgspec


class Factors(msgspec.Struct, frozen=True, kw_only=True):
    """Measured over predicted seconds, term by term."""

    prefill: float = 1.0
    """Rollout: prompts and tool results through the model."""
    decode: float = 1.0
    """Rollout: steps that generate."""
    tool: float = 1.0
    """Rollout: time in tools."""
    train: float = 1.0
    """Training: the whole step, because one measured number cannot divide it."""


NONE = Factors()
