"""Files of the rollout leader on a full or failing disk: what is dropped first, and which events that writes.

- Trajectories cannot be written -> their lines wait in memory; decisions are dropped, which leaves the room to them.
- Decisions cannot be written, or are more than two files of `DECISIONS_BYTES` -> dropped; ``decisions_dropped``, once.
- A file fails, or works again -> ``storage_fault`` with the reason, ``storage_ok`` with the number of lost lines.

Nothing raises into the loop of the leader.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from libra_hpc.facts.journal import Journal
from libra_hpc.rollout.recovery.recovery_log import RecoveryLog

KEEP_LINES = 20_000
"""Trajectories' lines that wait for room: some 40 MB."""
DECISIONS_BYTES = 32 << 20
"""Length of `decisions.jsonl` at which it becomes `decisions.jsonl.old`: some 90,000 turns of 350 bytes, half of them
the reason in words and numbers. Half: a batch of long episodes may not fit; double: most of a run beside its weights.
"""


class StorageFaults:
    """Events about parts of the run directory that cannot be written, or can again; ``log`` writes them."""

    def __init__(self, log: Callable[..., None]) -> None:
        self._log, self._failing = log, set[str]()

    def report(self, part: str, fault: str, dropped: int) -> None:
        """``fault``: why the last write failed, empty: it did not; ``dropped``: what is in no file, in all."""
        if fault and part not in self._failing:
            self._failing.add(part)
            self._log("storage_fault", part=part, reason=f"{part} cannot be written: {fault}")
        elif not fault and part in self._failing:
            self._failing.remove(part)
            self._log("storage_ok", part=part, reason=f"{part} can be written again", dropped=dropped)


class Storage:
    def __init__(self, trajectories: Journal[Any], decisions: Journal[Any], log: Callable[..., None]) -> None:
        self.trajectories, self.decisions, self._log, self.faults = trajectories, decisions, log, StorageFaults(log)
        self._drop_logged = False

    async def flush(self, recovery_log: RecoveryLog | None, new: list[Any]) -> None:
        """Write what is new, lines first.

        A start goes on with what the recovery log has, and does not write its lines again: they must be there.
        """
        await self.trajectories.flush()
        if self.trajectories.fault:
            self.decisions.drop()
        await self.decisions.flush()
        if (self.decisions.dropped or self.decisions.cut) and not self._drop_logged:
            self._drop_logged = True
            kept = f"decisions.jsonl and decisions.jsonl.old have the newest, at most {2 * DECISIONS_BYTES >> 20} MiB"
            self._log("decisions_dropped", reason=self.trajectories.fault or self.decisions.fault or kept)
        if recovery_log is not None:
            await recovery_log.write(new)
            self.faults.report("experience", recovery_log.failed, 0)
        self.faults.report("trajectories.jsonl", self.trajectories.fault, self.trajectories.dropped)
        self.faults.report("decisions.jsonl", self.decisions.fault, self.decisions.dropped)

    async def close(self) -> None:
        await self.trajectories.close()
        await self.decisions.close()
