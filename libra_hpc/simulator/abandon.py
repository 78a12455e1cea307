"""The optional capability to give up running trajectories and start them anew later (over-sampling).

Only a driver that owns the workload can honour it, so policies with it run in the simulator alone: a live run trains on
what it started.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import msgspec


class OpenTrajectory(msgspec.Struct, frozen=True):
    """A trajectory that started and has not ended."""

    trajectory: str
    prompt_id: str
    sample: int
    attained_tokens: int
    """Generated so far; lost when it is abandoned."""
    step: int
    """Training step (round) it was started for."""


@runtime_checkable
class Abandons(Protocol):
    """A policy that may abort trajectories."""

    def abandon(self, open: Sequence[OpenTrajectory], finished_groups: int, groups: int, now: float) -> Sequence[str]:
        """Asked whenever a group (all samples of a prompt) has finished: which of the ``open`` trajectories to abort
        now.

        ``finished_groups`` of the ``groups`` started in this round are complete.  The driver forgets the aborted ones
        and starts them from their prompts, under the same names, once everything else of the round has ended (the long
        round).
        """
