"""`tail_batching`: over-sample and defer (RollPacker, arXiv 2509.21009): no model of length at all.

A round starts `OVERSAMPLE` = 1.25 times the groups it needs.  Once the needed share has finished, what is still open is
aborted and put into a queue; when everything else of the round has ended, the queue runs as a long round, to the end: a
trajectory is aborted at most once.  With 1.25 about four short rounds fill one long round.  Tokens of aborted
trajectories are lost.  Siblings that had finished are kept, where the original samples the prompt anew.

Routing is `sticky` (engine of the last turn, else fewest turns in flight): the publication changes the order of work
only.  It needs a driver that honours `Abandons`: the simulator.
"""

from __future__ import annotations

from collections.abc import Sequence

from libra_hpc.sched.baselines.least_loaded import Sticky
from libra_hpc.sched.protocol import Finished
from libra_hpc.simulator.abandon import OpenTrajectory

OVERSAMPLE = 1.25


class TailBatching(Sticky):
    """See the module; implements `Abandons`."""

    name = "tail_batching"

    def __init__(self, oversample: float = OVERSAMPLE) -> None:
        super().__init__()
        self._oversample = oversample
        self._deferred: set[str] = set()

    def abandon(self, open: Sequence[OpenTrajectory], finished_groups: int, groups: int, now: float) -> Sequence[str]:
        """See `Abandons.abandon`: everything open that was not aborted before, once ``groups`` / `OVERSAMPLE` groups
        have finished."""
        if finished_groups * self._oversample < groups:
            return ()
        aborted = [t.trajectory for t in open if t.trajectory not in self._deferred]
        self._deferred.update(aborted)
        return aborted

    def finished(self, record: Finished, now: float) -> None:
        """See `Policy.finished`."""
        self._deferred.discard(record.trajectory)
        super().finished(record, now)
