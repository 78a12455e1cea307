"""The event log and the metrics file: append-only JSON lines, one writer each, line-buffered so that a kill loses at most the last line."""

from __future__ import annotations

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
        """Append one record."""
        self._handle.write(self._encoder.encode(record) + b"\n")

    def write_all(self, records: Iterable[dict[str, Any]]) -> None:
        """Append several records in one `write`."""
        lines = b"".join(self._encoder.encode(record) + b"\n" for record in records)
        if lines:
            self._handle.write(lines)

    def close(self) -> None:
        """Close the file."""
        self._handle.close()
