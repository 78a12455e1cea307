"""`LineLog`: append-only JSON lines with one writer, unbuffered so that a kill loses at most the last line."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

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

    - The file ends within a line (an earlier attempt, a failed write) -> that line is closed first.
    - A write fails -> `OSError`, and the file is cut back to its length before, if the file system allows that.
    """

    def __init__(self, path: Path) -> None:
        self._handle = path.open("a+b", buffering=0)
        self._torn = True
        """Whether the file may end within a line."""

    def write(self, record: dict[str, Any]) -> None:
        """Append one record."""
        self.append(line_of(record))

    def write_all(self, records: Iterable[dict[str, Any]]) -> None:
        """Append several records in one `write`."""
        lines = b"".join(map(line_of, records))
        if lines:
            self.append(lines)

    def append(self, lines: bytes) -> None:
        """Append whole lines."""
        end = os.fstat(self._handle.fileno()).st_size
        if self._torn and end and os.pread(self._handle.fileno(), 1, end - 1) != b"\n":
            lines = b"\n" + lines
        self._torn = True
        try:
            while lines:
                # A full disk takes a part, and raises at the rest.
                lines = lines[self._handle.write(lines) :]
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._handle.fileno(), end)
            raise
        self._torn = False

    def close(self) -> None:
        """Close the file."""
        self._handle.close()
