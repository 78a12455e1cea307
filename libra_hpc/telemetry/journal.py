"""Append-only JSON lines of things that happen often, kept off the event loop.

`LineLog` writes each record where it happens.  A scheduling decision or a finished trajectory happens thousands of
times a second, so a `Journal` only takes a reference, and `flush`, called about once a second, renders and writes
everything since the last call in one `write`, in another thread.  A kill loses what came after the last flush and no
more: whatever is in the file is whole lines, except perhaps the last, which readers skip.

- The file cannot be written (no room, an I/O error) -> `fault` says why, the newest ``keep`` lines wait in memory, and
  every `flush` tries again.
- More lines wait -> the oldest are dropped and counted in `dropped`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

from libra_hpc.errors import error_text

from .events import LineLog, line_of

Record = TypeVar("Record")
LINES = 256
"""Lines of one `write`: a disk without room is asked for little, once a second."""


class Journal(Generic[Record]):
    """One file; ``render`` turns a record into a line's object and must not need anything that changes after `add`.
    Raises no `OSError`."""

    def __init__(self, path: Path, render: Callable[[Record], dict[str, Any]], keep: int = 0) -> None:
        self._path, self._render, self._keep = path, render, keep
        self._log: LineLog | None = None
        self._records: list[Record] = []
        self._lines: list[bytes] = []
        """Rendered, and not in the file."""
        self._flushing = asyncio.Lock()
        self.fault = ""
        """Why the last write failed; empty when it did not."""
        self.dropped = 0
        """Lines that are in no file."""

    def add(self, record: Record) -> None:
        """Keep a record for the next `flush`."""
        self._records.append(record)

    def drop(self) -> None:
        """Give up what was added since the last `flush`: something more important needs the room."""
        self.dropped += len(self._records)
        self._records = []

    async def flush(self) -> None:
        """Write what was added before the call, in order, in a thread."""
        async with self._flushing:
            records, self._records = self._records, []
            if records or self._lines:
                await asyncio.to_thread(self._write, records)

    async def close(self) -> None:
        """Write the rest and close the file; nothing may be flushed afterwards."""
        await self.flush()
        if self._log is not None:
            self._log.close()

    def _write(self, records: list[Record]) -> None:
        self._lines += [line_of(self._render(record)) for record in records]
        try:
            if self._log is None:
                self._log = LineLog(self._path)
            while self._lines:
                self._log.append(b"".join(self._lines[:LINES]))
                del self._lines[:LINES]
        except OSError as error:
            self.fault = error_text(error)
            excess = max(0, len(self._lines) - self._keep)
            self.dropped += excess
            self._lines = self._lines[excess:]
            return
        self.fault = ""
