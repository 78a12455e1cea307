"""The event log and the metrics file: append-only JSON lines, one writer each, line-buffered so that a kill loses at most the last line."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec


class LineLog:
    """Append-only JSON lines.  Each record is one `write` of one whole line; a torn last line of an earlier attempt is closed first."""

    def __init__(self, path: Path) -> None:
        torn = False
        if path.exists() and path.stat().st_size:
            with path.open("rb") as existing:
                existing.seek(-1, 2)
                torn = existing.read(1) != b"\n"
        self._handle = path.open("ab", buffering=0)
        self._encoder = msgspec.json.Encoder()
        if torn:
            self._handle.write(b"\n")

    def write(self, record: dict[str, Any]) -> None:
        """Append one record; raises as `write_all`."""
        self.write_all([record])

    def write_all(self, records: Iterable[dict[str, Any]]) -> None:
        """Append several records, all or none: after a failed or short write the file ends where it ended before.  Raises `OSError`."""
        lines = memoryview(b"".join(self._encoder.encode(record) + b"\n" for record in records))
        before = os.fstat(self._handle.fileno()).st_size
        try:
            while lines:
                lines = lines[self._handle.write(lines) :]
        except OSError:
            # A full disk refuses bytes, not the return of some.
            with contextlib.suppress(OSError):
                self._handle.truncate(before)
            raise

    def close(self) -> None:
        """Close the file."""
        self._handle.close()
