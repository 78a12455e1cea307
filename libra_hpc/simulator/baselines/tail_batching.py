"""`tail_batching`: over-sample and defer the longest trajectories (RollPacker, arXiv 2509.21009).

* A round starts `OVERSAMPLE` times the groups it needs.
* The needed groups have finished -> all open trajectories are aborted; their tokens are lost.
* Everything else of the round has ended -> the aborted ones run to their end (long round): at most one abort each.
* Routing is that of `sticky`: the engine of the last turn, else the one with the fewest turns in flight.

Unlike the original, finished siblings of an aborted trajectory are used.  The policy needs `Abandons`, hence the
simulator.
"""

from __future__ import annotations

from collections.abc import Sequence

from libra_hpc.policies.scheduling.baselines.least_loaded import Sticky
from libra_hpc.policies.scheduling.protocol import Finished
from libra_hpc.simulator.abandon import UnfinishedTrajectory

OVERSAMPLE = 1.25
"""Groups started per group needed; with 1.25 about four rounds fill one long round."""


class TailBatching(Sticky):
    """The policy; implements `Abandons`."""

    name = "tail_batching"

    def __init__(self, oversample: float = OVERSAMPLE) -> None:
        super().__init__()
        self._oversample = oversample
        self._deferred: set[str] = set()

    def abandon(
        self, open: Sequence[UnfinishedTrajectory], finished_groups: int, groups: int, now: float
    ) -> Sequence[str]:
        """See `Abandons.abandon`: all open ones not aborted before, once ``groups`` / `OVERSAMPLE` have finished."""
        if finished_groups * self._oversample < groups:
            return ()
        aborted = [t.trajectory for t in open if t.trajectory not in self._deferred]
        self._deferred.update(aborted)
        return aborted

    def finished(self, record: Finished, now: float) -> None:
        self._deferred.discard(record.trajectory)
        super().finished(record, now)
