"""Snapshots on one node: its own parts in shared memory, and copies of the parts of the node before it in the ring.

- All processes of the node have written -> manifest, rename, and the leader hears it.
- Then the part is sent to the next node of the core, piece by piece; that one tells the leader once it is whole.
- A snapshot is complete, or given up -> parts that are of no use any more are removed.
- A node has lost its part of the snapshot that all restart from -> it asks the one that has a copy.

The folder outlives the agent (`libra_hpc.process.agent_folders`). Names have the start of the ranks in them, so that
parts of two starts never count together.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from libra_hpc.protocol.agents import KeepSnapshot, SnapshotChunk, SnapshotStored, SnapshotWanted
from libra_hpc.protocol.trainer import SnapshotFailed, SnapshotTaken, TakeSnapshot

from . import state_folders as folders
from .store import states, step_of, unreadable

CHUNK_BYTES = 16 << 20
"""One piece is in flight at a time, between those of weight files."""
OWN, COPIES = "own", "copies"
RESTORE_S = 600.0
"""For a part of hundreds of GB to come back over the network."""
ASK_S = 2.0
"""Between two requests for a lost part: an agent that has not started yet drops the first ones."""

log = logging.getLogger("libra_hpc.state")
Send = Callable[..., None]


def held(folder: Path) -> tuple[str, ...]:
    """Complete parts of this node: ``own/NAME`` and ``copies/NAME``; their content is checked when it is used."""
    found = [state.folder for kind in (OWN, COPIES) for state in states(folder / kind)]
    return tuple(sorted(str(path.relative_to(folder)) for path in found if not part_damage(path, sizes_only=True)))


def part_damage(path: Path, *, sizes_only: bool = False) -> str:
    """Why a part of a snapshot is not whole; in memory, unreadable is as good as lost."""
    try:
        why = folders.verify(path, sizes_only=sizes_only)
    except OSError as error:
        why = f"{unreadable(error)}."
    if why:
        log.warning("snapshot %s is passed over: %s", path, why)
    return why


class SnapshotKeeper:
    """See the module docstring; ``start`` names this start of the ranks, ``successor`` is the next node, or None."""

    def __init__(self, folder: Path, rank: int, start: str, *, leader: int, successor: int | None, send: Send) -> None:
        self._folder, self._rank, self._start = folder, rank, start
        self._leader, self._successor, self._send = leader, successor, send
        self._tasks: set[asyncio.Future[None]] = set()
        self._sending: set[int] = set()
        """Nodes to which a lost part is on its way."""

    @property
    def own(self) -> Path:
        return self._folder / OWN

    def begin(self, keep: str) -> None:
        """Remove all snapshots of earlier starts but ``keep``."""
        _remove(self._parts(lambda name: name != keep))

    def keep(self, message: KeepSnapshot) -> None:
        """Remove what is of no use any more: in a thread, because that takes seconds for hundreds of GB."""
        old = self._parts(lambda name: step_of(name) < message.complete or step_of(name) == message.dropped)
        self._spawn(asyncio.to_thread(_remove, old))

    def order(self, message: TakeSnapshot) -> TakeSnapshot:
        """The order for the processes, with their folder."""
        partial = _partial(self._path(message.step))
        shutil.rmtree(partial, ignore_errors=True)
        # Without the folder the processes fail to write, which they report.
        with contextlib.suppress(OSError):
            partial.mkdir(parents=True)
        return msgspec.structs.replace(message, folder=str(partial))

    def taken(self, answer: SnapshotTaken | SnapshotFailed) -> None:
        """All processes have answered."""
        if isinstance(answer, SnapshotFailed):
            self._failed(answer.step, self._rank, answer.reason)
        else:
            self._spawn(self._publish(folders.TrainerState(answer.step, answer.updates)))

    async def restore(self, name: str, holder: int | None) -> str:
        """Have the own part whole: one that is damaged is fetched from the successor. Returns what was wrong with it.

        ``holder``: the node that has a copy of a part that is known to be lost.
        """
        why = "" if holder is not None else await asyncio.to_thread(part_damage, self.own / name)
        if why and self._successor is None:
            self.discard(name)
            raise OSError(f"snapshot {name} is damaged: {why}")
        if (source := self._successor if why else holder) is not None:
            await self.fetch(name, source)
        return why

    async def fetch(self, name: str, holder: int) -> None:
        """Have a lost part sent back; raises `OSError` when it does not come."""
        self.discard(name)
        path, deadline = self.own / name, time.monotonic() + RESTORE_S
        while not path.exists():
            if time.monotonic() > deadline:
                raise OSError(f"the copy of snapshot {name} did not come back within {RESTORE_S:.0f} s")
            if not _partial(path).exists():
                self._send(holder, SnapshotWanted(self._rank, name))
            await asyncio.sleep(ASK_S)

    def on_wanted(self, message: SnapshotWanted) -> None:
        """Send the copy of a part to the node that lost it."""
        if message.owner not in self._sending:
            self._sending.add(message.owner)
            self._spawn(self._send_back(message))

    async def _send_back(self, message: SnapshotWanted) -> None:
        copy = self._folder / COPIES / message.name
        try:
            if await asyncio.to_thread(part_damage, copy):
                # The next start then does not count on it.
                shutil.rmtree(copy, ignore_errors=True)
            await self._stream(message.owner, message.owner, copy)
        finally:
            self._sending.discard(message.owner)

    def discard(self, name: str) -> None:
        """Remove the own part of a snapshot."""
        shutil.rmtree(self.own / name, ignore_errors=True)

    def chunk(self, message: SnapshotChunk, blob: bytes | bytearray) -> None:
        """Take a piece of a copy, or of an own part that comes back; only into the folder of that part."""
        if any(name != Path(name).name for name in (message.name, message.file)):
            return
        path = self._folder / (OWN if message.owner == self._rank else COPIES) / message.name
        partial = _partial(path)
        if not message.file:
            self._spawn(self._received(message.owner, partial, path))
            return
        try:
            partial.mkdir(parents=True, exist_ok=True)
            with (partial / message.file).open("r+b" if message.offset else "wb", buffering=0) as file:
                os.pwrite(file.fileno(), blob, message.offset)
        except OSError:
            # The manifest then finds it.
            shutil.rmtree(partial, ignore_errors=True)

    def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()

    def _path(self, step: int) -> Path:
        return self.own / f"step-{step:08d}.{self._start}"

    def _failed(self, step: int, owner: int, reason: str) -> None:
        self._send(self._leader, SnapshotStored(self._rank, owner, step, reason))

    async def _publish(self, state: folders.TrainerState) -> None:
        final = self._path(state.step)
        partial = _partial(final)

        def publish() -> None:
            (partial / folders.STATE_FILE).write_bytes(msgspec.json.encode(state))
            folders.publish(partial, final)

        try:
            await asyncio.to_thread(publish)
        except OSError as error:
            self._failed(state.step, self._rank, str(error))
            return
        self._send(self._leader, SnapshotStored(self._rank, self._rank, state.step))
        if self._successor is not None:
            await self._stream(self._successor, self._rank, final)

    async def _stream(self, to: int, owner: int, folder: Path) -> None:
        """Send a part; ends without a word when the receiver is gone, or the part was removed."""
        try:
            for path in sorted(folder.iterdir()):
                offset = 0
                while piece := await asyncio.to_thread(_read, path, offset):
                    if not await self._piece(to, SnapshotChunk(owner, folder.name, path.name, offset), piece):
                        return
                    offset += len(piece)
        except OSError:
            return
        self._send(to, SnapshotChunk(owner, folder.name, "", 0))

    async def _piece(self, to: int, message: SnapshotChunk, piece: bytes) -> bool:
        sent: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

        def done(taken: bool) -> None:
            if not sent.done():
                sent.set_result(taken)

        self._send(to, message, piece, done)
        return await sent

    async def _received(self, owner: int, partial: Path, path: Path) -> None:
        def finish() -> str:
            if problem := part_damage(partial):
                shutil.rmtree(partial, ignore_errors=True)
                return f"the copy did not come whole, /dev/shm may be full: {problem}"
            partial.rename(path)
            return ""

        try:
            reason = await asyncio.to_thread(finish)
        except OSError as error:
            reason = str(error)
        self._send(self._leader, SnapshotStored(self._rank, owner, step_of(path.name), reason))

    def _parts(self, chosen: Callable[[str], bool]) -> list[Path]:
        """Parts and unfinished ones, by the snapshot's name."""
        found = [path for kind in (OWN, COPIES) for path in (self._folder / kind).glob("step-*")]
        return [path for path in found if chosen(path.name.removesuffix(folders.TEMPORARY))]

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)

        def done(finished: asyncio.Future[None]) -> None:
            self._tasks.discard(task)
            if not finished.cancelled():
                finished.result()

        task.add_done_callback(done)


def _partial(path: Path) -> Path:
    return path.with_name(f"{path.name}{folders.TEMPORARY}")


def _remove(paths: list[Path]) -> None:
    for path in paths:
        shutil.rmtree(path, ignore_errors=True)


def _read(path: Path, offset: int) -> bytes:
    with path.open("rb", buffering=0) as file:
        return os.pread(file.fileno(), CHUNK_BYTES, offset)
