"""The optional capability of a policy to abort trajectories and restart them later (over-sampling).

Policies with it run in the simulator alone: a live run trains on every trajectory it started.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import msgspec


class UnfinishedTrajectory(msgspec.Struct, frozen=True):
    """A trajectory that started and has not ended, as `Abandons` receives it."""

    trajectory: str
    prompt_id: str
    sample: int
    attained_tokens: int
    """Generated so far; lost when the trajectory is aborted."""
    step: int


@runtime_checkable
class Abandons(Protocol):
    """A policy that may abort trajectories."""

    def abandon(
        self, open: Sequence[UnfinishedTrajectory], finished_groups: int, groups: int, now: float
    ) -> Sequence[str]:
        """Trajectories among ``open`` to abort now; called whenever a group (all samples of a prompt) has finished.

        ``finished_groups`` of the ``groups`` started in this round are complete.  The simulator restarts the aborted
        trajectories from their prompts, under the same names, after everything else of the round (the long round).
        """
