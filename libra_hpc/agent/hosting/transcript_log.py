"""Transcripts of the rollout leader, written off its loop; a full disk costs transcripts, never a step."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

from libra_hpc.config.run import RunConfig
from libra_hpc.errors import error_text
from libra_hpc.protocol.agents import Group
from libra_hpc.rollout.records.transcripts import TranscriptWriter
from libra_hpc.rollout.trajectory import Trajectory

from .storage import StorageFaults

GB = 1_000_000_000
MOST_WAITING = 64
"""Steps in memory: those of a second, or while the file system does not answer; older ones are left out."""
MOST_FAILED = 64
"""Failed attempts of a step that are retained, the newest.  Half: a rare error may be missing; double: 64 long contexts
more in memory."""


class TranscriptLog:
    """``log`` writes an event."""

    def __init__(self, folder: Path, config: RunConfig, log: Callable[..., None]) -> None:
        budget = int(config.run.transcripts_gb * GB)
        # Simulated engines write no text.
        self._wanted = budget > 0 and config.run.engine == "real"
        # Made by the first write, because it reads the folder.
        self._writer = cache(partial(TranscriptWriter, folder, budget))
        self._waiting: deque[tuple[int, list[Trajectory], tuple[Group, ...], str]] = deque()
        self._failed: deque[Trajectory] = deque(maxlen=MOST_FAILED)
        self._log, self._faults, self._dropped, self._removed = log, StorageFaults(log), 0, False

    def failed(self, trajectory: Trajectory) -> None:
        """Record a failed attempt, beside the next step."""
        if self._wanted:
            self._failed.append(trajectory)

    def end(self, step: int) -> None:
        """Record the attempts that failed since the last step as those of ``step``, which was not composed."""
        if self._failed:
            self.add(step, [], ())

    def add(self, step: int, trajectories: list[Trajectory], groups: tuple[Group, ...], evaluation: str = "") -> None:
        """Record what a step is trained on, or its evaluation; written by the next `flush`."""
        if not evaluation:
            trajectories = [*trajectories, *self._failed]
            self._failed.clear()
        if self._wanted:
            self._waiting.append((step, trajectories, groups, evaluation))
        if len(self._waiting) > MOST_WAITING:
            self._waiting.popleft()
            self._dropped += 1
            self._faults.report("transcripts", "the file system does not answer", self._dropped)

    async def flush(self) -> None:
        """Write what waits; what cannot be written is left out, and the first failure is an event."""
        while self._waiting:
            batch = self._waiting.popleft()
            try:
                removed = await asyncio.to_thread(lambda batch: self._writer().write(*batch), batch)
            except OSError as error:
                self._dropped += 1
                self._faults.report("transcripts", error_text(error), self._dropped)
                continue
            self._faults.report("transcripts", "", self._dropped)
            if removed and not self._removed:
                self._removed = True
                self._log("transcripts_removed", step=batch[0], reason="run.transcripts_gb is used")
