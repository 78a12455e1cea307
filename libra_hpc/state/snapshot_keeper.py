"""Snapshots on one node: its own parts in shared memory, and copies of the parts of the node before it in the ring.

- All processes of the node have written -> manifest, rename, and the leader hears it.
- Then the next node of the core has its carrier pull the part, and reports to the leader once it is whole.
- A snapshot is complete, or given up -> parts that are of no use any more are removed.
- A node has lost its part of the snapshot that all restart from -> it asks the one that has a copy, and pulls that.

The folder outlives the agent (`libra_hpc.process.agent_folders`). Names have the start of the ranks in them, so that
parts of two starts never count together.  ``RANK/NAME`` is the part of that rank: an own one, or a copy.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from libra_hpc.files import complete_folder
from libra_hpc.process.child import spawn
from libra_hpc.process.retry import cannot
from libra_hpc.protocol.agents import FromReplica, SnapshotPart
from libra_hpc.protocol.carriers import Peer
from libra_hpc.protocol.trainer import KeepState, Saved, SaveFailed, SaveState

from . import state_folders as folders
from .store import states, step_of

RESTORE_S = 600.0
"""For a part of hundreds of GB to come back over the network."""
ASK_S = 2.0
"""Between two requests for a lost part: an agent that has not started yet drops the first ones."""
CARRIER_S = 0.2
"""Between two looks at a carrier that starts."""

log = logging.getLogger("libra_hpc.state")
Send = Callable[[int, FromReplica | SnapshotPart], None]


def successors(core: Sequence[int]) -> dict[int, int]:
    """Node of the core -> the one that has a copy of its part; none where there is one node."""
    return {rank: core[(i + 1) % len(core)] for i, rank in enumerate(core)} if len(core) > 1 else {}


class PartCarrier(Protocol):
    """What moves parts between nodes."""

    peer: Peer | None
    """Where it serves; None: it does not yet."""

    async def pull_part(self, peer: Peer, source: str, target: Path) -> str:
        """Get a part into a new folder; returns why it did not come, or an empty string."""


def whole_parts(folder: Path) -> tuple[str, ...]:
    """Complete parts that a node has, as ``RANK/NAME``; their content is checked when it is used."""
    found = [state.folder for rank in _ranks(folder) for state in states(rank)]
    return tuple(sorted(str(path.relative_to(folder)) for path in found if not part_damage(path, sizes_only=True)))


def part_damage(path: Path, *, sizes_only: bool = False) -> str:
    """Why a part of a snapshot is not whole; in memory, unreadable is as good as lost."""
    try:
        why = folders.verify(path, sizes_only=sizes_only)
    except OSError as error:
        why = f"{cannot(error)}."
    if why:
        log.warning("snapshot %s is passed over: %s", path, why)
    return why


class SnapshotKeeper:
    """See the module docstring; ``successor`` is the next node, or None."""

    def __init__(
        self, folder: Path, rank: int, *, leader: int, successor: int | None, send: Send, carrier: PartCarrier
    ) -> None:
        self._folder, self._rank = folder, rank
        self._leader, self._successor, self._send, self._carrier = leader, successor, send, carrier
        self._tasks: set[asyncio.Task[None]] = set()
        self._pulling: set[Path] = set()

    @property
    def own(self) -> Path:
        return self._folder / str(self._rank)

    def begin(self, keep: str) -> None:
        """Remove all snapshots of earlier starts but ``keep``."""
        _remove(self._parts(lambda name: name != keep))

    def keep(self, message: KeepState) -> None:
        """Remove what is of no use any more: in a thread, because that takes seconds for hundreds of GB."""
        old = self._parts(lambda name: step_of(name) < message.complete or name == message.dropped)
        self._spawn(asyncio.to_thread(_remove, old))

    def order(self, message: SaveState) -> SaveState:
        """The order for the processes, with their folder."""
        partial = _partial(self.own / message.folder)
        # Without the folder the processes fail to write, which they report.
        with contextlib.suppress(OSError):
            partial.mkdir(parents=True)
        return msgspec.structs.replace(message, folder=str(partial))

    def written(self, answer: Saved | SaveFailed) -> None:
        """All processes of the node have written their parts, or failed."""
        path = self.own / Path(answer.folder).name.removesuffix(folders.TEMPORARY)
        if isinstance(answer, SaveFailed):
            self._report(path, answer.reason)
        else:
            self._spawn(self._publish(path))

    async def restore(self, name: str, holder: int | None) -> str:
        """Have the own part whole: one that is damaged comes from the successor. Returns what was wrong with it.

        ``holder``: the node that has a copy of a part that is known to be lost. Raises `OSError` when it does not come.
        """
        path, why = self.own / name, ""
        if holder is None:
            why = await asyncio.to_thread(part_damage, path)
            if not why:
                return ""
            holder = self._successor
        self.discard(name)
        if holder is None:
            raise OSError(f"snapshot {name} is damaged: {why}")
        deadline = time.monotonic() + RESTORE_S
        while not path.exists():
            if time.monotonic() > deadline:
                raise OSError(f"the copy of snapshot {name} did not come back within {RESTORE_S:.0f} s")
            if path not in self._pulling:
                self._send(holder, SnapshotPart(self._rank, name))
            await asyncio.sleep(ASK_S)
        return why

    def on_part(self, message: SnapshotPart) -> None:
        """Offer a copy to the node that lost its part; or pull one, only into the folder of that part."""
        path = self._folder / str(message.part_of) / message.name
        if message.name != path.name:
            return
        if message.peer is None:
            self._spawn(self._offer_copy(message))
        elif path not in self._pulling:
            self._pulling.add(path)
            self._spawn(self._pull(message.peer, path))

    async def _offer_copy(self, message: SnapshotPart) -> None:
        copy = self._folder / str(message.part_of) / message.name
        if await asyncio.to_thread(part_damage, copy):
            # The next start then does not count on it.
            shutil.rmtree(copy, ignore_errors=True)
        else:
            await self._offer(message.part_of, message.part_of, message.name)

    async def _offer(self, to: int, part_of: int, name: str) -> None:
        while (peer := self._carrier.peer) is None:
            await asyncio.sleep(CARRIER_S)
        self._send(to, SnapshotPart(part_of, name, peer))

    def discard(self, name: str) -> None:
        """Remove the own part of a snapshot."""
        shutil.rmtree(self.own / name, ignore_errors=True)

    async def _pull(self, peer: Peer, path: Path) -> None:
        partial = _partial(path)

        def finish(reason: str) -> str:
            if problem := reason or part_damage(partial):
                shutil.rmtree(partial, ignore_errors=True)
                return f"the copy did not come whole, /dev/shm may be full: {problem}"
            complete_folder(partial, path)
            return ""

        try:
            await asyncio.to_thread(shutil.rmtree, partial, True)
            came = await self._carrier.pull_part(peer, str(path.relative_to(self._folder)), partial)
            reason = await asyncio.to_thread(finish, came)
        except OSError as error:
            reason = str(error)
        finally:
            self._pulling.discard(path)
        self._report(path, reason)

    def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()

    def _report(self, path: Path, reason: str = "") -> None:
        step, part_of = step_of(path.name), int(path.parent.name)
        if reason:
            answer: Saved | SaveFailed = SaveFailed(path.name, step, reason, "snapshot", part_of)
        else:
            answer = Saved(path.name, step, 0.0, tier="snapshot", part_of=part_of)
        self._send(self._leader, FromReplica(self._rank, answer))

    async def _publish(self, path: Path) -> None:
        try:
            await asyncio.to_thread(folders.publish, _partial(path), path)
        except OSError as error:
            self._report(path, str(error))
            return
        self._report(path)
        if self._successor is not None:
            await self._offer(self._successor, self._rank, path.name)

    def _parts(self, chosen: Callable[[str], bool]) -> list[Path]:
        """Parts and unfinished ones, by the snapshot's name."""
        found = [path for rank in _ranks(self._folder) for path in rank.glob("step-*")]
        return [path for path in found if chosen(path.name.removesuffix(folders.TEMPORARY))]

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = spawn(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _ranks(folder: Path) -> list[Path]:
    """Folders with the parts of a rank each."""
    return [path for path in folder.glob("*") if path.name.isdecimal()]


def _partial(path: Path) -> Path:
    return path.with_name(f"{path.name}{folders.TEMPORARY}")


def _remove(paths: list[Path]) -> None:
    for path in paths:
        shutil.rmtree(path, ignore_errors=True)
