"""Correction factors: what measurements say about each term of the cost models.

Every predicted time is a sum of terms, and every term is multiplied by its own factor: measured seconds over predicted
seconds, 1.0 where nothing was measured.  The models stay pure: who measures keeps the factors and passes them in.
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
    compute: float = 1.0
    """Training: forward, backward and recomputed FLOPs.  No factor takes the model above the device's peak."""
    comm: float = 1.0
    """Training: exposed communication of all kinds."""
    optimizer: float = 1.0
    """Training: the update."""


NONE = Factors()
"""Nothing measured."""
