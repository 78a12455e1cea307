"""The spool: trajectories that no checkpoint contains yet, in files of the run directory, so that a new start of all
ranks goes on with them.

Once a second the rollout leader's agent has what finished since appended, and at the end what is in mid-course, in a
thread, to the newest *segment*: frames of a length, a CRC-32 and a msgpack value that decodes to a
`libra_hpc.rollout.recovered.FinishedTrajectory` and to nothing else.  A reader stops at the first frame that is torn or
damaged, so a kill in mid-write costs that frame.  ``starts.json`` lists every start of the ranks with its step and its
digest; a segment's name begins with the number of its start, and no start writes to another's.  What of it counts for a
new start is `libra_hpc.rollout.recovered`'s to say.

A record is needed until its prompt is trained at the newest checkpoint, since a crash goes back there.  One that is
trained now, but not there, is needed only if it would count there: its tokens are of versions up to that checkpoint's.
So however rarely checkpoints are saved, at most 2 (eta + 1) B groups are needed, and a segment without any is removed,
within `TRIM_S` of the checkpoint.

Cost: 9 bytes a token and some 130 a turn, 0.2 s of CPU per 1,000 trajectories of 20,000 tokens.  A batch of 2,048 such
ones is 370 MB, at five minutes a batch 1.2 MB/s; with eta = 1 up to 1.5 GB are needed at once.  When a file cannot be
written (a full disk) the spool removes all it has, which is better than a checkpoint that finds no room, and begins
again after `RETRY_S` with what finishes from then on.  A restart samples the rest again.

`SEGMENT_BYTES`: few files for a large run; a small one has one of at most this size.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec

from libra_hpc.errors import error_text
from libra_hpc.files import write_atomic
from libra_hpc.protocol.codec import FrameError
from libra_hpc.protocol.mesh import Committed

from .recovered import DAMAGED, FinishedTrajectory, Recovered, Start, TrainedPrompts, gather, records, verdict
from .trajectory import Trajectory

SEGMENT_BYTES = 64 << 20
TRIM_S = 10.0
RETRY_S = 60.0
"""Half: a full disk is filled again before anybody can make room; double: a restart soon after samples twice as much
again."""
STARTS = "starts.json"
_FRAME = struct.Struct("<II")
"""Length and CRC-32 of a frame's value."""


def frame(record: FinishedTrajectory) -> bytes:
    """A record as it stands in a segment."""
    value = records.encode(record)
    return _FRAME.pack(len(value), zlib.crc32(value)) + value


def read_segment(path: Path) -> tuple[list[FinishedTrajectory], bool]:
    """Records up to the first frame that is none, and whether that was the end of the file."""
    found: list[FinishedTrajectory] = []
    try:
        left = path.stat().st_size
        with path.open("rb") as handle:
            while left:
                length, crc = _FRAME.unpack(handle.read(_FRAME.size))
                left -= _FRAME.size + length
                value = handle.read(length) if left >= 0 else b""
                if left < 0 or zlib.crc32(value) != crc:
                    return found, False
                record = records.decode(value)
                if not record.sound:
                    return found, False
                found.append(record)
    except (OSError, struct.error, FrameError, RecursionError):
        return found, False
    return found, True


def read_starts(folder: Path) -> list[Start]:
    """Every start so far, oldest first; empty when the list is missing or damaged, and then no segment counts."""
    try:
        return msgspec.json.decode((folder / STARTS).read_bytes(), type=list[Start])
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return []


class RecoveryLog:
    """One start's spool, which raises no `OSError`.  `recover` comes first, `close` last; ``clock`` is monotonic
    seconds."""

    failed = ""
    """Why nothing is kept at present; empty while it is."""

    def __init__(
        self,
        folder: Path,
        position: Callable[[], TrainedPrompts],
        clock: Callable[[], float],
        segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        self._folder, self._position, self._clock, self._segment_bytes = folder, position, clock, segment_bytes
        self._trimmed_at = clock()
        self._needed: dict[Path, dict[int, int]] = {}
        """Of every segment: prompt -> lowest version at which a checkpoint makes one of its records count."""
        self._committed: set[int] = set()
        self._number = self._sequence = 0
        self._starts: list[Start] = []
        self._failed_at = 0.0
        self._handle: BinaryIO | None = None
        self._writing = asyncio.Lock()

    async def recover(self, digest: str, position: TrainedPrompts, eta: int) -> Recovered:
        """Begin a start at ``position``: what of earlier ones counts for it."""
        return await asyncio.to_thread(self._recover, digest, position, eta)

    def _recover(self, digest: str, position: TrainedPrompts, eta: int) -> Recovered:
        try:
            return gather(self._begin(digest, position, eta))
        except OSError as error:
            self._give_up(error)
            return gather(())

    def _begin(
        self, digest: str, position: TrainedPrompts, eta: int
    ) -> Iterator[tuple[FinishedTrajectory | None, str]]:
        """Every record found, oldest first, with its verdict; none for a file that cannot be read to its end."""
        starts = self._starts = [*read_starts(self._folder), Start(position.step, digest)]
        self._number = len(starts) - 1
        self._list_starts()
        for path, number in list(self._segments()):
            read, whole = read_segment(path) if number < self._number else ([], False)
            if not whole:
                yield None, DAMAGED
            for record in read:
                reason = verdict(record, number, starts, position, eta)
                if not reason:
                    self._note(path, record)
                yield record, reason
            if path not in self._needed:
                path.unlink()

    def _list_starts(self) -> None:
        # Before anything of this start is written: what the list does not have is a start whose weights would pass for
        # those of another.
        self._folder.mkdir(exist_ok=True)
        write_atomic(self._folder / STARTS, msgspec.json.encode(self._starts) + b"\n")

    def _segments(self) -> Iterator[tuple[Path, int]]:
        """Segments with the number of their start, in the order in which they were written."""
        for path in sorted(self._folder.glob("[0-9]*-[0-9]*.frames")):
            number = path.stem.split("-")[0]
            if number.isdecimal():
                yield path, int(number)

    def _note(self, path: Path, record: FinishedTrajectory) -> None:
        groups = self._needed.setdefault(path, {})
        groups[record.index] = min(record.newest, groups.get(record.index, record.newest))

    async def write(self, new: Sequence[Trajectory | FinishedTrajectory | Committed]) -> None:
        """Append finished trajectories and records of others, and take note of what is trained."""
        async with self._writing:
            await asyncio.to_thread(self._write, new)

    async def close(self) -> None:
        """Leave what a start would need now, and nothing else; nothing may be written afterwards."""
        async with self._writing:
            await asyncio.to_thread(self._close)

    def _write(self, new: Sequence[Trajectory | FinishedTrajectory | Committed]) -> None:
        self._committed.update(index for record in new if isinstance(record, Committed) for index in record.indices)
        if self.failed and self._clock() - self._failed_at < RETRY_S:
            return
        try:
            if self.failed:
                self._list_starts()
                self.failed = ""
            for record in new:
                if not isinstance(record, Committed):
                    self._append(record if isinstance(record, FinishedTrajectory) else FinishedTrajectory.of(record))
            if self._handle is not None:
                self._handle.flush()
            if self._clock() - self._trimmed_at >= TRIM_S:
                self._trimmed_at = self._clock()
                self._trim()
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self.failed, self._failed_at = error_text(error), self._clock()
        handle, self._handle = self._handle, None
        if handle is not None:
            with contextlib.suppress(OSError):
                handle.close()
        self._needed.clear()
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def _path(self) -> Path:
        return self._folder / f"{self._number:05d}-{self._sequence:06d}.frames"

    def _append(self, record: FinishedTrajectory) -> None:
        if self._handle is None:
            self._sequence += 1
            self._handle = self._path.open("ab")
        self._handle.write(frame(record))
        self._note(self._path, record)
        if self._handle.tell() >= self._segment_bytes:
            self._end_segment()

    def _trim(self) -> None:
        """Remove the segments that no start will need, except one that is being written."""
        try:
            position = self._position()
        except (OSError, ValueError):
            # The checkpoint cannot be read now, so what is needed is unknown; the log's own files are sound.
            return
        self._committed = {index for index in self._committed if not position.trained(index)}
        for path, groups in list(self._needed.items()):
            needed = any(
                not position.trained(index) and (index not in self._committed or version <= position.step)
                for index, version in groups.items()
            )
            if not needed and (self._handle is None or path != self._path):
                path.unlink(missing_ok=True)
                del self._needed[path]

    def _end_segment(self) -> None:
        if self._handle is not None:
            self._handle.close()
            self._handle = None

    def _close(self) -> None:
        if self.failed:
            return
        try:
            self._end_segment()
            self._trim()
        except OSError as error:
            self._give_up(error)
