"""The train leader's saved states of one tier: at most one is being written, while training goes on.

- Due, at a step boundary -> the core is asked (`Saves.ask`); the data position is that of this step.
- Every node of the core has written its part, and the next one has its copy of a snapshot's -> the `StateStore` gets
  manifest and data position, without which a state does not count.
- A part, a copy or the completion failed, or a copy does not come within `COPIES_S` -> given up. A checkpoint is due
  again after a pause, which doubles up to a longest one; the next snapshot after that is due as usual.
- A node of the core is lost before all have written -> that state is never complete; due again at once.
- Due while one is being written -> asked for at the first step boundary after its end.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple, Protocol

from libra_hpc.process.child import spawn
from libra_hpc.process.retry import Retry
from libra_hpc.protocol.agents import StepReport
from libra_hpc.protocol.trainer import Saved, SaveFailed, SaveStarted, SaveState, Tier
from libra_hpc.state.snapshot_keeper import successors
from libra_hpc.state.state_folders import DataOrder, DataPosition, Manifest, position_of

SAVE_FIRST_S, SAVE_LONGEST_S = 10.0, 300.0
"""Pauses in seconds after a failed save; each attempt writes the whole state."""
COPIES_S = 300.0
"""For all parts and copies of a snapshot.

Half: a copy of hundreds of GB over a slow network is given up. Double: a copy that was lost on the way stops snapshots
for ten minutes.
"""


class StateStore(Protocol):
    """Where the states of a tier are; its methods may take minutes."""

    tier: Tier

    def folder(self, step: int, number: int) -> str:
        """For the order of this number; a process of an earlier order or start may still write to its own folder."""

    async def complete(self, folder: str, manifest: Manifest, position: DataPosition) -> None:
        """Make what was written the state of its step; raises `OSError`."""

    async def discard(self, folder: str) -> None:
        """Remove what nobody writes to any more; raises `OSError`."""


class _Save(NamedTuple):
    folder: str
    position: DataPosition
    began: float
    missing: set[tuple[int, int]]
    """(node, node whose part it is to have)"""
    files: Manifest
    reasons: list[str]
    """Why parts could not be written."""

    @property
    def taking(self) -> bool:
        """Whether a node has not written its own part yet."""
        return any(rank == part_of for rank, part_of in self.missing)


class Saves:
    """See the module docstring; ``log`` writes an event, ``changed`` is called at the end of a write."""

    def __init__(
        self,
        core: tuple[int, ...],
        step: int,
        every: int,
        *,
        complete: bool,
        store: StateStore,
        storage_s: float,
        clock: Callable[[], float],
        log: Callable[..., None],
        changed: Callable[[], None],
    ) -> None:
        """``step``: where this start begins; ``complete``: with a state of this tier, which needs no other one.

        ``every``: steps from one to the next; 0: none is ever due.
        ``storage_s``: the longest time for the store's methods.
        """
        self._core, self._store, self._tier, self._storage_s = core, store, store.tier, storage_s
        self._every, self._clock, self._log, self._changed = every, clock, log, changed
        copies = successors(core) if self._tier == "snapshot" else {}
        self._parts = {*((rank, rank) for rank in core), *((holder, rank) for rank, holder in copies.items())}
        self.retry = Retry(SAVE_FIRST_S, SAVE_LONGEST_S)
        self._due = False
        self.saved_step = step
        """Step of the newest complete state, or the one that this start began with."""
        self._complete = complete
        self.failure = ""
        """Why the last save failed; empty after a success."""
        self.save_s = 0.0
        """Seconds of the last save that was completed; 0: none was."""
        self._asked = 0
        self._now: _Save | None = None
        self._stopped_s = 0.0
        self._task: asyncio.Task[None] | None = None

    @property
    def writing(self) -> bool:
        return self._now is not None

    @property
    def taking(self) -> bool:
        """Whether a node has not written its own part yet."""
        return self._now is not None and self._now.taking

    def committed(self, step: int) -> None:
        """A state is due every so many steps."""
        self._due = self._due or (self._every > 0 and step % self._every == 0)

    def possible(self) -> bool:
        """Whether to ask for one now."""
        now, save = self._clock(), self._now
        if self._tier == "snapshot" and save and save.missing and now - save.began > COPIES_S:
            self._give_up("; ".join((*save.reasons, f"a part of it did not come within {COPIES_S:.0f} s")))
            self.retry.failed(now)
        return self._due and not self.writing and self.retry.due(now)

    def has(self, step: int) -> bool:
        """Whether the state of a step is complete."""
        return self._complete and self.saved_step == step

    def ask(self, step: int, order: DataOrder, reports: Sequence[StepReport]) -> SaveState:
        """The order to the core; what is passed belongs to the state, whatever is trained until its end."""
        assert self._now is None, "one at a time"
        self._asked += 1
        self._due, self._stopped_s = False, 0.0
        folder = self._store.folder(step, self._asked)
        self._now = _Save(folder, position_of(step, order, reports), self._clock(), set(self._parts), {}, [])
        if self._tier == "checkpoint":
            self._log("checkpoint_started", step=step)
        return SaveState(folder, step, self._tier)

    def on_started(self, message: SaveStarted) -> None:
        if self._now is not None and message.folder == self._now.folder:
            self._stopped_s = max(self._stopped_s, message.seconds)

    def on_answer(self, rank: int, message: Saved | SaveFailed) -> None:
        """An answer of a node; those of other nodes or to an earlier request count for nothing."""
        now, part = self._now, (rank, rank if message.part_of < 0 else message.part_of)
        if now is None or part not in now.missing or message.folder != now.folder:
            return
        now.missing.discard(part)
        if isinstance(message, SaveFailed):
            now.reasons.append(message.reason)
        else:
            now.files.update(message.files)
        # Nobody writes to what is discarded.
        if not now.missing or (now.reasons and not now.taking):
            now.missing.clear()
            self._task = spawn(self._end(now))

    def core_lost(self, reason: str) -> None:
        """A node of the core has lost its processes, for this reason; parts that are complete stay."""
        if self.taking:
            self._give_up(f"the core ended while it was written: {reason}")
            self._due = True

    def _give_up(self, reason: str) -> None:
        assert self._now is not None
        self._failed(self._now.position.step, reason)
        self._task = spawn(self._discard(self._now.folder))
        self._now = None
        self._changed()

    def _failed(self, step: int, reason: str) -> None:
        if self._tier == "checkpoint":
            self._log("checkpoint_failed", step=step, reason=reason)
        else:
            self._log("snapshot_failed", step=step, reason=reason)

    async def _end(self, save: _Save) -> None:
        step = save.position.step
        if save.reasons:
            self.failure = save.reasons[0]
            await self._discard(save.folder)
        else:
            self.failure = await self._within(self._store.complete(save.folder, save.files, save.position))
        if self.failure:
            self.retry.failed(self._clock())
            self._due = self._due or self._tier == "checkpoint"
            self._failed(step, self.failure)
        else:
            self.retry.succeeded()
            self.saved_step, self._complete = step, True
            self.save_s = self._clock() - save.began
            if self._tier == "checkpoint":
                self._log("checkpoint_saved", step=step, seconds=self.save_s, stopped_s=self._stopped_s)
        self._now = None
        self._changed()

    async def _discard(self, folder: str) -> None:
        with contextlib.suppress(OSError):
            await asyncio.wait_for(self._store.discard(folder), self._storage_s)

    async def _within(self, work: Awaitable[None]) -> str:
        """Wait for the storage; empty, or why it failed."""
        try:
            await asyncio.wait_for(work, self._storage_s)
        except OSError as error:
            # The timeout of `wait_for` has no text.
            return str(error) or f"the {self._tier} was not completed within {self._storage_s:.0f} s"
        return ""
