"""Files of the rollout leader that may meet a full or failing disk: what is given up first, and what the event log is
told.

- Trajectories cannot be written -> their lines wait in memory, and decisions are dropped, which leaves them the room.
- Decisions cannot be written -> they are dropped; the first time, ``decisions_dropped`` says so.
- A file fails, or works again -> ``storage_fault`` with the reason, ``storage_ok`` with the number of lines that were
  lost.

Nothing raises into the loop of the leader.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from libra_hpc.rollout.recovery_log import RecoveryLog
from libra_hpc.telemetry.journal import Journal

KEEP_LINES = 20_000
"""Trajectories' lines that wait for room: some 40 MB."""


class Storage:
    """``log`` writes an event."""

    def __init__(self, trajectories: Journal[Any], decisions: Journal[Any], log: Callable[..., None]) -> None:
        self.trajectories, self.decisions, self._log = trajectories, decisions, log
        self._faults: dict[str, str] = {}
        self._told = False

    async def flush(self, spool: RecoveryLog | None, new: list[Any]) -> None:
        """Write what is new; lines first: what the spool has is in `trajectories.jsonl`, so that a start which goes
        on with it need not write it."""
        await self.trajectories.flush()
        if self.trajectories.fault:
            self.decisions.drop()
        await self.decisions.flush()
        if self.decisions.dropped and not self._told:
            self._told = True
            self._log("decisions_dropped", reason=self.trajectories.fault or self.decisions.fault)
        if spool is not None:
            await spool.write(new)
            self._tell("experience", spool.failed, 0)
        self._tell("trajectories.jsonl", self.trajectories.fault, self.trajectories.dropped)
        self._tell("decisions.jsonl", self.decisions.fault, self.decisions.dropped)

    async def close(self) -> None:
        """Write the rest and close the files."""
        await self.trajectories.close()
        await self.decisions.close()

    def _tell(self, part: str, fault: str, dropped: int) -> None:
        if fault and part not in self._faults:
            self._log("storage_fault", part=part, reason=f"{part} cannot be written: {fault}")
        elif not fault and part in self._faults:
            self._log("storage_ok", part=part, reason=f"{part} can be written again", dropped=dropped)
        if fault:
            self._faults[part] = fault
        else:
            self._faults.pop(part, None)
