"""TranscriptLog of the rollout leader, written off its loop; a full disk costs transcripts, never a step."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from pathlib import Path

from libra_hpc.config.run import RunConfig
from libra_hpc.errors import error_text
from libra_hpc.protocol.agents import Group
from libra_hpc.rollout.records.transcripts import TranscriptWriter
from libra_hpc.rollout.trajectory import Trajectory

GB = 1_000_000_000
MOST_WAITING = 64
"""Steps in memory: those of a second, or while the file system does not answer; older ones are left out."""


class TranscriptLog:
    """``log`` writes an event."""

    def __init__(self, folder: Path, config: RunConfig, log: Callable[..., None]) -> None:
        budget = int(config.run.transcripts_gb * GB)
        # Simulated engines say nothing.
        self._wanted = budget > 0 and config.run.engine == "real"
        self._folder, self._budget, self._log = folder, budget, log
        self._task = "" if config.task.train else config.task.name
        self._writer: TranscriptWriter | None = None
        self._waiting: deque[tuple[int, list[Trajectory], tuple[Group, ...]]] = deque(maxlen=MOST_WAITING)
        self._removed, self._fault = False, ""

    def add(self, step: int, trajectories: list[Trajectory], groups: tuple[Group, ...]) -> None:
        """Record what a step is trained on; written by the next `flush`."""
        if self._wanted:
            self._waiting.append((step, trajectories, groups))

    async def flush(self) -> None:
        """Write what waits; what cannot be written is left out, and the first failure is an event."""
        while self._waiting:
            step, trajectories, groups = self._waiting.popleft()
            try:
                removed = await asyncio.to_thread(self._write, step, trajectories, groups)
            except OSError as error:
                if not self._fault:
                    self._fault = f"transcripts cannot be written: {error_text(error)}"
                    self._log("storage_fault", part="transcripts", reason=self._fault)
                continue
            if self._fault:
                self._fault = ""
                self._log("storage_ok", part="transcripts", reason="transcripts can be written again", dropped=0)
            if removed and not self._removed:
                self._removed = True
                self._log("transcripts_removed", step=step, reason="run.transcripts_gb is used")

    def _write(self, step: int, trajectories: list[Trajectory], groups: tuple[Group, ...]) -> int:
        if self._writer is None:
            self._writer = TranscriptWriter(self._folder, self._task, self._budget)
        return self._writer.write(step, trajectories, groups)
