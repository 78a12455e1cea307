"""`Journal`: append-only JSON lines for records that come thousands of times a second.

- `add` -> holds a reference to the record; no I/O on the event loop.
- `flush`, about once a second -> renders and writes all records since the last one, in another thread.
- A kill -> loses the records after the last flush, and perhaps tears the last line, which readers skip.
- A write fails -> `fault` has the reason, the newest ``keep`` lines wait in memory, and every `flush` tries again.
- More than ``keep`` lines wait -> the oldest are dropped and counted in `dropped`.
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
"""Lines of one `write`: on a full disk a small write fails fast."""


class Journal(Generic[Record]):
    """One file; ``render`` turns a record into a JSON object and must not read state that changes after `add`.

    Raises no `OSError`.
    """

    def __init__(self, path: Path, render: Callable[[Record], dict[str, Any]], keep: int = 0) -> None:
        self._path, self._render, self._keep = path, render, keep
        self._log: LineLog | None = None
        self._records: list[Record] = []
        self._lines: list[bytes] = []
        """Rendered and not yet written."""
        self._flushing = asyncio.Lock()
        self.fault = ""
        """Reason of the last failed write; empty when the last one succeeded."""
        self.dropped = 0
        """Lines that are in no file."""

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
