"""Records of things that happen often, written off the event loop: `Buffered`, and a `Journal` of JSON lines.

`LineLog` writes each record where it happens.  A scheduling decision or a finished trajectory happens thousands of times a second, so `Buffered` only
takes a reference, and `flush`, called about once a second, renders and writes everything since the last call in one go, in another thread.  A
kill loses what came after the last flush and no more: whatever is in a journal is whole lines, except perhaps the last, which readers skip.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

from .events import LineLog

Record = TypeVar("Record")


class Buffered(ABC, Generic[Record]):
    """Keeps records for the next `flush`; they must not change after `add`.  A subclass says how they are written and what is closed at the end."""

    def __init__(self) -> None:
        self._records: list[Record] = []
        self._flushing = asyncio.Lock()

    def add(self, record: Record) -> None:
        """Keep a record for the next `flush`."""
        self._records.append(record)

    async def flush(self) -> None:
        """Write what was added before the call, in order, in a thread.  Raises what `_write` does."""
        async with self._flushing:
            records, self._records = self._records, []
            if records:
                await asyncio.to_thread(self._write, records)

    async def close(self) -> None:
        """Write the rest and close the file; nothing may be flushed afterwards."""
        await self.flush()
        self._close()

    @abstractmethod
    def _write(self, records: list[Record]) -> None:
        """Write records; never called by two threads at once."""

    @abstractmethod
    def _close(self) -> None:
        """Close what is open."""


class Journal(Buffered[Record]):
    """One file of lines; ``render`` turns a record into a line's object.  `flush` raises `OSError` when the file cannot be written."""

    def __init__(self, path: Path, render: Callable[[Record], dict[str, Any]]) -> None:
        super().__init__()
        self._log = LineLog(path)
        self._render = render

    def _write(self, records: list[Record]) -> None:
        self._log.write_all([self._render(record) for record in records])

    def _close(self) -> None:
        self._log.close()
