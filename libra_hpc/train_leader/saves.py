"""The train leader's checkpoints: at most one is being written, while training goes on.

- Due, at a step boundary -> the core is asked (`Saves.ask`); the data position is that of this step.
- Every node of the core has written its part -> manifest and data position complete the checkpoint.
- A part or the completion failed -> due again after a pause, which doubles up to a longest one.
- A node of the core is lost before all have written -> that checkpoint is never complete; due again at once.
- Due while one is being written -> asked for at the first step boundary after its end.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from libra_hpc.process.retry import Retry
from libra_hpc.protocol.agents import StepReport
from libra_hpc.protocol.trainer import SaveCheckpoint, Saved, SaveFailed, SaveStarted
from libra_hpc.state.data_order import DataOrder
from libra_hpc.state.state_folders import TEMPORARY, DataPosition, Manifest, position_of

SAVE_FIRST_S, SAVE_LONGEST_S = 10.0, 300.0
"""Pauses in seconds after a failed checkpoint; each attempt writes the whole state."""


class Store(Protocol):
    """Where checkpoints are; its methods may take minutes."""

    async def complete(self, folder: Path, manifest: Manifest, position: DataPosition) -> None:
        """Make a written folder the checkpoint of its step; raises `OSError`, and nothing of it remains."""

    async def discard(self, folder: Path) -> None:
        """Remove a folder that nobody writes to any more; raises `OSError`."""


class _Save(NamedTuple):
    folder: Path
    position: DataPosition
    began: float
    answers: dict[int, Saved | SaveFailed]


class Saves:
    """See the module docstring; ``log`` writes an event, ``changed`` is called at the end of a write."""

    def __init__(
        self,
        core: tuple[int, ...],
        step: int,
        *,
        complete: bool,
        parent: Path,
        start: str,
        store: Store,
        storage_s: float,
        clock: Callable[[], float],
        log: Callable[..., None],
        changed: Callable[[], None],
    ) -> None:
        """``step``: where this start begins; ``complete``: at a checkpoint, which needs no other one.

        ``parent`` has the checkpoints; ``start`` names this start of the ranks among all of the run. ``storage_s``: the
        longest time for `Store`'s methods.
        """
        self._core, self._parent, self._start, self._store, self._storage_s = core, parent, start, store, storage_s
        self._clock, self._log, self._changed = clock, log, changed
        self.retry = Retry(SAVE_FIRST_S, SAVE_LONGEST_S)
        self._due = False
        self.saved_step = step
        """Step of the newest complete checkpoint, or the one that this start began with."""
        self._complete = complete
        self.failure = ""
        """Why the last save failed; empty after a success."""
        self.save_s = 0.0
        """Seconds of the last checkpoint that was completed; 0: none was."""
        self._asked = 0
        self._now: _Save | None = None
        self._stopped_s = 0.0
        self._task: asyncio.Task[None] | None = None

    @property
    def writing(self) -> bool:
        return self._now is not None

    def request(self) -> None:
        """A checkpoint is due."""
        self._due = True

    def possible(self) -> bool:
        """Whether to ask for a checkpoint now."""
        return self._due and not self.writing and self.retry.due(self._clock())

    def has(self, step: int) -> bool:
        """Whether the checkpoint of a step is complete."""
        return self._complete and self.saved_step == step

    def ask(self, step: int, order: DataOrder, reports: Sequence[StepReport]) -> SaveCheckpoint:
        """The order to the core; what is passed belongs to the checkpoint, whatever is trained until its end."""
        assert self._now is None, "one checkpoint at a time"
        self._asked += 1
        self._due, self._stopped_s = False, 0.0
        # A process of an earlier save or start may still write to its own folder.
        folder = self._parent / f"step-{step:06d}.{self._start}.{self._asked}{TEMPORARY}"
        self._now = _Save(folder, position_of(step, order, reports), self._clock(), {})
        self._log("checkpoint_started", step=step)
        return SaveCheckpoint(str(folder), step)

    def on_started(self, message: SaveStarted) -> None:
        self._stopped_s = max(self._stopped_s, message.seconds)

    def on_answer(self, rank: int, message: Saved | SaveFailed) -> None:
        """An answer of a node; those of other nodes or to an earlier request count for nothing."""
        now = self._now
        if now is None or rank not in self._core or message.folder != str(now.folder):
            return
        now.answers[rank] = message
        if len(now.answers) == len(self._core):
            self._task = asyncio.get_running_loop().create_task(self._end(now))
            # An exception here would otherwise wait for the garbage collector.
            self._task.add_done_callback(lambda task: task.cancelled() or task.result())

    def core_lost(self) -> None:
        """A node of the core has lost its processes."""
        if self._now is not None and len(self._now.answers) < len(self._core):
            self._task = asyncio.get_running_loop().create_task(self._discard(self._now.folder))
            self._log("checkpoint_failed", step=self._now.position.step, reason="the core ended while it was written")
            self._now, self._due = None, True
            self._changed()

    async def _end(self, save: _Save) -> None:
        answers, step = save.answers.values(), save.position.step
        reason = next((answer.reason for answer in answers if isinstance(answer, SaveFailed)), "")
        if not reason:
            parts = [answer.files for answer in answers if isinstance(answer, Saved)]
            manifest = {name: entry for files in parts for name, entry in files.items()}
            reason = await self._within(self._store.complete(save.folder, manifest, save.position))
        else:
            await self._discard(save.folder)
        if reason:
            self.retry.failed(self._clock())
            self._due = True
            self._log("checkpoint_failed", step=step, reason=reason)
        else:
            self.retry.succeeded()
            self.saved_step, self._complete = step, True
            self.save_s = self._clock() - save.began
            self._log("checkpoint_saved", step=step, seconds=self.save_s, stopped_s=self._stopped_s)
        self.failure, self._now = reason, None
        self._changed()

    async def _discard(self, folder: Path) -> None:
        with contextlib.suppress(OSError):
            await asyncio.wait_for(self._store.discard(folder), self._storage_s)

    async def _within(self, work: Awaitable[None]) -> str:
        """Wait for the storage; empty, or why it failed."""
        try:
            await asyncio.wait_for(work, self._storage_s)
        except OSError as error:
            # The timeout of `wait_for` has no text.
            return str(error) or f"the checkpoint was not completed within {self._storage_s:.0f} s"
        return ""
