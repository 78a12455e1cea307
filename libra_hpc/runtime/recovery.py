"""A restart of all ranks inside the allocation, because a part of the job was lost that the others cannot go on
without.

The planner, the train leader and the rollout leader hold state that nobody else has.  When one of them is lost the
ranks end, as for a repartition, and the launcher starts them again from the newest checkpoint
(`libra_hpc.slurm.outcome`), at most ``slurm.restarts`` times in an attempt.  While the train leader lives it saves
first, so that no step is lost.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from libra_hpc.files import write_atomic
from libra_hpc.slurm.outcome import REASON, RECOVER, RECOVERIES
from libra_hpc.telemetry.rundir import RunDir

SAVE_S = 60.0
"""How long the train leader may take to save before the ranks restart from an older checkpoint."""


class Recovery:
    """What rank 0 knows of it; ``environ`` carries what the launcher says of earlier ones."""

    def __init__(self, restarts: int, environ: Mapping[str, str] = os.environ) -> None:
        self.used = int(environ.get(RECOVERIES, "0") or 0)
        """Restarts of this attempt so far."""
        self.cause = environ.get(REASON, "")
        """Why this is a restart; empty for a first start and after a repartition."""
        self._restarts = restarts
        self.reason = ""
        """Why they are to restart now; empty while they are not."""
        self.deadline = 0.0
        """Epoch seconds until which the train leader may save."""

    def start(self, reason: str, now: float) -> bool:
        """Plan a restart; False when all are used."""
        if self.used >= self._restarts:
            return False
        if not self.reason:
            self.reason, self.deadline = reason, now + SAVE_S
        return True

    @property
    def exhausted(self) -> str:
        """Why there is none, as the end of a sentence."""
        return f"all {self._restarts} restarts of slurm.restarts are used"

    def leave(self, run: RunDir, attempt: int) -> None:
        """Tell the launcher; raises `OSError` when that cannot be written."""
        write_atomic(run.again(attempt), f"{RECOVER}{self.reason}\n".encode())
