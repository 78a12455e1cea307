"""Append-only JSON lines of things that happen often, kept off the event loop.

`LineLog` writes each record where it happens.  A scheduling decision or a finished trajectory happens thousands of times a second, so a `Journal` only
takes a reference, and `flush`, called about once a second, renders and writes everything since the last call in one `write`, in another thread.  A
kill loses what came after the last flush and no more: whatever is in the file is whole lines, except perhaps the last, which readers skip.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

from .events import LineLog

Record = TypeVar("Record")


class Journal(Generic[Record]):
    """One file; ``render`` turns a record into a line's object and must not need anything that changes after `add`."""

    def __init__(self, path: Path, render: Callable[[Record], dict[str, Any]]) -> None:
        self._log = LineLog(path)
        self._render = render
        self._records: list[Record] = []
        self._flushing = asyncio.Lock()

    def add(self, record: Record) -> None:
        """Keep a record for the next `flush`."""
        self._records.append(record)

    async def flush(self) -> None:
        """Write what was added before the call, in order, in a thread.  Raises `OSError` when the file cannot be written."""
        async with self._flushing:
            records, self._records = self._records, []
            if records:
                await asyncio.to_thread(self._write, records)

    async def close(self) -> None:
        """Write the rest and close the file; nothing may be flushed afterwards."""
        await self.flush()
        self._log.close()

    def _write(self, records: list[Record]) -> None:
        self._log.write_all([self._render(record) for record in records])
