"""The recovery log: trajectories that no checkpoint contains yet, in files of the run directory.

- Each second, and at the end -> append finished trajectories; at the end also the unfinished ones.
- Start of the ranks -> append it to ``starts.json``, and read what earlier starts left (`recover`).
- Every `TRIM_S` -> remove segments whose records no start can need.
- File cannot be written (full disk) -> remove the whole log, and begin again after `RETRY_S`.

A *segment* is a sequence of frames: length, CRC-32, msgpack of a `Trajectory`. Reading stops at the first damaged
frame. Its name begins with the number of its start; no other start writes to it. A record is needed until the newest
checkpoint has its prompt. If its prompt is trained since then, it is needed only if its weight versions are at most the
checkpoint's. An unfinished one also needs an environment that can be replayed (`libra_hpc.rollout.replay`).
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import struct
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec

from libra_hpc.errors import error_text
from libra_hpc.files import read_or_none, write_atomic
from libra_hpc.protocol.agents import Committed
from libra_hpc.protocol.codec import Codec, FrameError
from libra_hpc.protocol.layout import ResumePoint
from libra_hpc.rollout.trajectory import Trajectory

TRAINED, DAMAGED = "trained", "damaged"


records: Codec[Trajectory] = Codec(Trajectory)


class RecordedStart(msgspec.Struct, frozen=True):
    step: int
    """Step of the checkpoint it began with."""
    digest: str
    """Digest of everything that prompts and trajectories depend on."""


def drop_reason(
    record: Trajectory, number: int, starts: Sequence[RecordedStart], *, position: ResumePoint, eta: int
) -> str:
    """Why a record of start ``number`` (from 0) does not count for the last start (at ``position``); empty: it does.

    ``weights``: its versions are beyond the step that this start, or one in between, went back to. ``staleness``: its
    first token is of a version before step - eta.
    """
    if position.trained(record.index):
        return TRAINED
    if starts[number].digest != starts[-1].digest:
        return "configuration"
    if record.newest > min(start.step for start in starts[number + 1 :]):
        return "weights"
    if record.oldest + eta < position.step:
        return "staleness"
    return ""


class Recovered(msgspec.Struct, frozen=True):
    """The trajectories that count, and how many do not."""

    groups: Mapping[int, Sequence[Trajectory]]
    """Trajectories by prompt, finished and unfinished ones (`Trajectory.place`), each sample once."""
    dropped: Mapping[str, int]
    """Dropped trajectories by reason; ``damaged``: files with a part that cannot be read."""

    def event(self, group_size: int) -> dict[str, int | dict[str, float]]:
        both = [trajectory for group in self.groups.values() for trajectory in group]
        finished = [trajectory for trajectory in both if trajectory.place == "done"]
        begun = [trajectory for trajectory in both if trajectory.place != "done"]
        per_group = Counter(trajectory.index for trajectory in finished)
        return {
            "trajectories": len(finished),
            "groups": len(per_group),
            "whole_groups": sum(count == group_size for count in per_group.values()),
            "tokens": sum(trajectory.all_tokens for trajectory in finished),
            "generated_tokens": sum(trajectory.generated for trajectory in finished),
            "unfinished": len(begun),
            "unfinished_tokens": sum(part.generated for trajectory in begun for part in trajectory.growing),
            "dropped": dict(self.dropped),
        }


def gather(found: Iterable[tuple[Trajectory | None, str]]) -> Recovered:
    """Trajectories of the records (oldest first) without a `drop_reason`; of one sample's records the last counts."""
    chosen: dict[int, dict[int, Trajectory]] = {}
    dropped: Counter[str] = Counter()
    for record, reason in found:
        if record is not None and not reason:
            chosen.setdefault(record.index, {})[record.sample] = record
        elif reason != TRAINED:
            dropped[reason] += 1
    return Recovered({index: list(samples.values()) for index, samples in chosen.items()}, dropped)


_starts = msgspec.json.Decoder(list[RecordedStart])

SEGMENT_BYTES = 64 << 20
"""Size of a full segment: few files for a large run, one for a small run."""
TRIM_S = 10.0
"""Seconds between two searches for unneeded segments."""
RETRY_S = 60.0
"""Half: a full disk fills again before anybody makes room; double: a restart soon after samples twice as much again."""
STARTS = "starts.json"
_FRAME = struct.Struct("<II")
"""Length and CRC-32 of a frame's value."""


def frame(record: Trajectory) -> bytes:
    value = records.encode(record)
    return _FRAME.pack(len(value), zlib.crc32(value)) + value


def read_segment(path: Path) -> tuple[list[Trajectory], bool]:
    """Records up to the first damaged frame, and whether there was none."""
    found: list[Trajectory] = []
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


def read_starts(folder: Path) -> list[RecordedStart]:
    """Every start so far, oldest first; empty (and then no segment counts) when the list is missing or damaged."""
    return read_or_none(folder / STARTS, _starts) or []


class RecoveryLog:
    """The log of one start; raises no `OSError`.

    `recover` comes first, `close` last. ``position()``: that of the newest checkpoint. ``clock``: monotonic seconds.
    """

    failed = ""
    """Why nothing is written at present; empty while records are."""

    def __init__(
        self,
        folder: Path,
        position: Callable[[], ResumePoint],
        clock: Callable[[], float],
        segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        self._folder, self._position, self._clock, self._segment_bytes = folder, position, clock, segment_bytes
        self._trimmed_at = clock()
        self._needed: dict[Path, dict[int, int]] = {}
        """Needs of every segment: prompt -> lowest checkpoint step at which one of its records counts."""
        self._committed: set[int] = set()
        self._number = self._sequence = 0
        self._starts: list[RecordedStart] = []
        self.changed = False
        """Whether prompts and trajectories are made from something else than in the start before."""
        self._failed_at = 0.0
        self._handle: BinaryIO | None = None
        self._writing = asyncio.Lock()

    def recover(self, digest: str, position: ResumePoint, eta: int) -> Recovered:
        """Begin a start at ``position``, and read what counts for it; not for the event loop."""
        try:
            return gather(self._begin(digest, position, eta))
        except OSError as error:
            self._give_up(error)
            return gather(())

    def _begin(self, digest: str, position: ResumePoint, eta: int) -> Iterator[tuple[Trajectory | None, str]]:
        """Every record, oldest first, with its drop reason; None for a file that cannot be read to its end."""
        starts = self._starts = [*read_starts(self._folder), RecordedStart(position.step, digest)]
        self._number = len(starts) - 1
        self.changed = any(one.digest != digest for one in starts[-2:])
        self._list_starts()
        for path, number in list(self._segments()):
            read, whole = read_segment(path) if number < self._number else ([], False)
            if not whole:
                yield None, DAMAGED
            for record in read:
                reason = drop_reason(record, number, starts, position=position, eta=eta)
                if not reason:
                    self._note(path, record)
                yield record, reason
            if path not in self._needed:
                path.unlink()

    def _list_starts(self) -> None:
        # Before any record of this start: weight versions of a start that is not listed would pass for another's.
        self._folder.mkdir(exist_ok=True)
        write_atomic(self._folder / STARTS, msgspec.json.encode(self._starts) + b"\n")

    def _segments(self) -> Iterator[tuple[Path, int]]:
        for path in sorted(self._folder.glob("[0-9]*-[0-9]*.frames")):
            number = path.stem.split("-")[0]
            if number.isdecimal():
                yield path, int(number)

    def _note(self, path: Path, record: Trajectory) -> None:
        groups = self._needed.setdefault(path, {})
        groups[record.index] = min(record.newest, groups.get(record.index, record.newest))

    async def write(self, new: Sequence[Trajectory | Committed]) -> None:
        """Append trajectories, and note which prompts are trained."""
        async with self._writing:
            await asyncio.to_thread(self._write, new)

    async def close(self) -> None:
        """Remove all that no start would need now; nothing may be written afterwards."""
        async with self._writing:
            await asyncio.to_thread(self._close)

    def _write(self, new: Sequence[Trajectory | Committed]) -> None:
        self._committed.update(index for record in new if isinstance(record, Committed) for index in record.indices)
        if self.failed and self._clock() - self._failed_at < RETRY_S:
            return
        try:
            if self.failed:
                self._list_starts()
                self.failed = ""
            for record in new:
                if not isinstance(record, Committed):
                    self._append(record)
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

    def _append(self, record: Trajectory) -> None:
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
            # The checkpoint cannot be read now: it is unknown what is needed.
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
