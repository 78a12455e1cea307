"""The train leader's snapshots: which one all nodes of the core have in shared memory.

- Every ``every`` steps, at a step boundary -> the core's nodes take one (`Snapshots.ask`).
- Every node has its own part, and its successor in the ring of the core's nodes a copy -> complete: `SnapshotIndex`
  gets the data position, without which a snapshot does not count.
- Due while one is not complete, or while a checkpoint is written -> asked for at the first step boundary after that.
- A part cannot be stored, or does not come within `PATIENCE_S` -> given up; the next one is due as usual.
- One is complete or given up -> the nodes remove what is of no use any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

from libra_hpc.protocol.agents import KeepSnapshot, SnapshotStored, StepReport
from libra_hpc.protocol.trainer import TakeSnapshot

from .data_order import DataOrder
from .state_folders import DataPosition, position_of

PATIENCE_S = 300.0
"""For all parts and copies of a snapshot.

Half: a copy of hundreds of GB over a slow network is given up. Double: a copy that was lost on the way stops snapshots
for ten minutes.
"""
WARNING_S = 60.0
"""A full file system fails every snapshot: one event a minute is enough."""


class SnapshotIndex(Protocol):
    """Where complete snapshots are listed."""

    async def add(self, position: DataPosition) -> None:
        """The snapshot of this position is complete; raises `OSError`."""


class _Pending(NamedTuple):
    position: DataPosition
    began: float
    missing: set[tuple[int, int]]
    """(node, node whose part it is to have)"""


def holders(core: Sequence[int]) -> dict[int, int]:
    """Node of the core -> the one that has a copy of its part; none where there is one node."""
    return {rank: core[(i + 1) % len(core)] for i, rank in enumerate(core)} if len(core) > 1 else {}


class Snapshots:
    """See the module docstring; ``log`` writes an event."""

    def __init__(
        self,
        core: tuple[int, ...],
        every: int,
        *,
        complete: int,
        holders: Iterable[int] = (),
        index: SnapshotIndex,
        send: Callable[[int, KeepSnapshot], None],
        clock: Callable[[], float],
        log: Callable[..., None],
        changed: Callable[[], None],
    ) -> None:
        """``complete``: step of the snapshot with which this start began; -1: none.

        ``holders``: nodes that had parts of it for others.
        """
        self._nodes = {*core, *holders}
        self._core, self._every, self._index, self._send = core, every, index, send
        self._clock, self._log, self._changed = clock, log, changed
        self.complete = complete
        self._due = False
        self._now: _Pending | None = None
        self._warned_at = float("-inf")
        self._task: asyncio.Task[None] | None = None

    def committed(self, step: int) -> None:
        if self._every and step % self._every == 0:
            self._due = True

    @property
    def taking(self) -> bool:
        """Whether a node has not written its own part yet."""
        return self._now is not None and any(rank == part_of for rank, part_of in self._now.missing)

    def possible(self) -> bool:
        """Whether to take a snapshot now."""
        if self._now is not None and self._clock() - self._now.began > PATIENCE_S:
            self._give_up(f"a part of it did not come within {PATIENCE_S:.0f} s")
        return self._due and self._now is None

    def ask(self, step: int, order: DataOrder, reports: Sequence[StepReport]) -> TakeSnapshot:
        """The order to the core."""
        self._due = False
        copies = {(holder, rank) for rank, holder in holders(self._core).items()}
        missing = {(rank, rank) for rank in self._core} | copies
        self._now = _Pending(position_of(step, order, reports), self._clock(), missing)
        return TakeSnapshot("", step)

    def on_stored(self, message: SnapshotStored) -> None:
        now = self._now
        if now is None or message.step != now.position.step:
            return
        if message.reason:
            self._give_up(message.reason)
            return
        taking = self.taking
        now.missing.discard((message.rank, message.part_of))
        if taking and not self.taking:
            self._changed()
        if not now.missing:
            self._task = asyncio.get_running_loop().create_task(self._end(now))
            self._task.add_done_callback(lambda task: task.cancelled() or task.result())

    def core_lost(self) -> None:
        """A node of the core has lost its processes; parts that are complete stay."""
        if self.taking:
            self._now = None

    async def _end(self, pending: _Pending) -> None:
        try:
            await self._index.add(pending.position)
        except OSError as error:
            if self._now is pending:
                self._give_up(str(error))
            return
        self.complete = max(self.complete, pending.position.step)
        self._clear(KeepSnapshot(self.complete))
        if self._now is pending:
            self._now = None
            self._changed()

    def _give_up(self, reason: str) -> None:
        assert self._now is not None
        step, self._now = self._now.position.step, None
        self._clear(KeepSnapshot(self.complete, step))
        if self._clock() - self._warned_at >= WARNING_S:
            self._warned_at = self._clock()
            self._log("snapshot_failed", step=step, reason=reason)

    def _clear(self, message: KeepSnapshot) -> None:
        for rank in sorted(self._nodes):
            self._send(rank, message)
