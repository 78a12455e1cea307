"""Append-only JSON lines: `LineLog`, one `write` a line, and `Journal`, for thousands of records a second.

- `LineLog.write` -> unbuffered, so that a kill loses at most the last line.
- `Journal.add` -> holds a reference to the record; no I/O on the event loop.
- `Journal.flush`, about once a second -> renders and writes all records since the last one, in another thread.
- A kill -> loses the records after the last flush, and perhaps tears the last line, which readers skip.
- A write fails -> `fault` has the reason, the newest ``keep`` lines wait in memory, and every `flush` tries again.
- More than ``keep`` lines wait -> the oldest are dropped and counted in `dropped`.
- The file is longer than ``most`` bytes -> it becomes `NAME.old`, and the `NAME.old` of before is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from libra_hpc.errors import error_text

Record = TypeVar("Record")
LINES = 256
"""Lines of one `write` of a `Journal`: on a full disk a small write fails fast."""
_encoder = msgspec.json.Encoder()


def line_of(record: dict[str, Any]) -> bytes:
    """A record as a JSON line; one that cannot be encoded becomes a line with its text as ``unwritable``."""
    try:
        return _encoder.encode(record) + b"\n"
    except (TypeError, ValueError, OverflowError):
        known = {key: record[key] for key in ("t", "step") if isinstance(record.get(key), int | float)}
        return (
            _encoder.encode({**known, "kind": ascii(record.get("kind", "")), "unwritable": ascii(record)[:500]}) + b"\n"
        )


class LineLog:
    """Append-only JSON lines; each record is one `write` of one whole line.

    - The file was removed -> it is made again.
    - The file ends within a line (an earlier attempt, a failed write) -> that line is closed first.
    - A write fails -> `OSError`, and the file is cut back to its length before, if the file system allows that.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._handle = path, path.open("a+b", buffering=0)
        self._torn = True
        """Whether the file may end within a line."""

    def write(self, record: dict[str, Any]) -> None:
        """Append one record."""
        self.write_all([record])

    def write_all(self, records: Iterable[dict[str, Any]]) -> None:
        """Append several records in one `write`."""
        lines = b"".join(map(line_of, records))
        if lines:
            self.append(lines)

    def append(self, lines: bytes) -> None:
        """Append whole lines."""
        state = os.fstat(self._handle.fileno())
        if not state.st_nlink:
            # Somebody removed the file; its folder may still be there.
            removed, self._handle = self._handle, self._path.open("a+b", buffering=0)
            removed.close()
        end = state.st_size if state.st_nlink else self.size
        if self._torn and end and os.pread(self._handle.fileno(), 1, end - 1) != b"\n":
            lines = b"\n" + lines
        self._torn = True
        try:
            while lines:
                # A full disk takes a part, and raises at the rest.
                lines = lines[self._handle.write(lines) :]
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._handle.fileno(), end)
            error.filename = str(self._path)
            raise
        self._torn = False

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return os.fstat(self._handle.fileno()).st_size

    def close(self) -> None:
        self._handle.close()


class Journal(Generic[Record]):
    """One file; ``render`` turns a record into a JSON object and must not read state that changes after `add`.

    Raises no `OSError`.
    """

    def __init__(
        self, path: Path, render: Callable[[Record], dict[str, Any]], keep: int = 0, most: int | None = None
    ) -> None:
        self._path, self._render, self._keep, self._most = path, render, keep, most
        self._log: LineLog | None = None
        self._records: list[Record] = []
        self._lines: list[bytes] = []
        """Rendered and not yet written."""
        self._flushing = asyncio.Lock()
        self.fault = ""
        """Reason of the last failed write; empty when the last one succeeded."""
        self.dropped = 0
        """Lines that are in no file."""
        self.cut = False
        """Whether a `NAME.old` was replaced."""

    def add(self, record: Record) -> None:
        """Hold a record for the next `flush`."""
        self._records.append(record)

    def drop(self) -> None:
        """Drop the records since the last `flush`: something more important needs the disk space."""
        self.dropped += len(self._records)
        self._records = []

    async def flush(self) -> None:
        """Write what was added before the call, in order, in a thread."""
        async with self._flushing:
            records, self._records = self._records, []
            if records or self._lines:
                await asyncio.to_thread(self._write, records)

    async def close(self) -> None:
        """Write the rest and close the file."""
        await self.flush()
        if self._log is not None:
            self._log.close()

    def _write(self, records: list[Record]) -> None:
        self._lines += [line_of(self._render(record)) for record in records]
        try:
            log = self._opened()
            while self._lines:
                log.append(b"".join(self._lines[:LINES]))
                del self._lines[:LINES]
        except OSError as error:
            self.fault = error_text(error)
            excess = max(0, len(self._lines) - self._keep)
            self.dropped += excess
            self._lines = self._lines[excess:]
            return
        self.fault = ""

    def _opened(self) -> LineLog:
        """The file; one that is too long is moved aside."""
        if self._log is None:
            self._log = LineLog(self._path)
        if self._most is not None and self._log.size > self._most:
            old = self._path.with_name(f"{self._path.name}.old")
            self.cut = self.cut or old.exists()
            self._path.replace(old)
            self._log.close()
            self._log = LineLog(self._path)
        return self._log
