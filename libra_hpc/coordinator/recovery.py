"""A restart of all ranks inside the allocation, after the loss of a part that the others cannot go on without.

The planner, the train leader and the rollout leader hold state that nobody else has.

- One of them is lost -> the ranks end, and the launcher restarts them from the newest checkpoint (`slurm/outcome.py`).
- The train leader lives -> it saves first, so that no step is lost.
- ``slurm.restarts`` restarts of this attempt are used -> the run fails.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from libra_hpc.facts.rundir import RunDir
from libra_hpc.files import write_atomic
from libra_hpc.slurm.outcome import REASON, RECOVER, RECOVERIES

SAVE_S = 60.0
"""How long the train leader may take to save before the ranks restart from an older checkpoint."""


class Recovery:
    """Restarts of this attempt; ``environ`` carries what the launcher noted of earlier ones."""

    def __init__(self, restarts: int, environ: Mapping[str, str] = os.environ) -> None:
        self.used = int(environ.get(RECOVERIES, "0") or 0)
        self.cause = environ.get(REASON, "")
        """Why this is a restart; empty for a first start and after a repartition."""
        self._restarts = restarts
        self.reason = ""
        """Why the ranks are to restart now; empty while they are not."""
        self.deadline = 0.0
        """Epoch seconds until which the train leader may save."""

    def start(self, reason: str, now: float) -> bool:
        """Plan a restart; False when all are used."""
        if self.spent:
            return False
        if not self.reason:
            self.reason, self.deadline = reason, now + SAVE_S
        return True

    @property
    def spent(self) -> bool:
        """Whether none is left."""
        return self.used >= self._restarts

    @property
    def exhausted(self) -> str:
        """Why there is none, as the end of a sentence."""
        return f"all {self._restarts} restarts of slurm.restarts are used"

    def request_restart(self, run: RunDir, attempt: int) -> None:
        """Leave the request for the launcher; raises `OSError` when that cannot be written."""
        write_atomic(run.again(attempt), f"{RECOVER}{self.reason}\n".encode())
