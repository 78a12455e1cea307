"""Read a trace of any known format, gzip or not, and write the project's own format."""

from __future__ import annotations

import gzip
import itertools
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgspec

from libra_hpc.errors import UserError, invalid
from libra_hpc.files import write_result
from libra_hpc.protocol.trace import TrajectoryRecord

from . import azure, kv_cache_tester, mooncake
from . import own_format as libra
from .record import Bad

Reader = Callable[[Iterable[tuple[int, bytes]], Bad], Iterator[TrajectoryRecord]]
READERS: dict[str, Reader] = {
    "libra": libra.read,
    "kv-cache-tester": kv_cache_tester.read,
    "mooncake": mooncake.read,
    "azure": azure.read,
}
AUTO = "auto"
HEAD = 65536
"""Bytes at the start of a file in which its format is detected: the keys of the first object, or the header."""
GZIP = b"\x1f\x8b"

_MARKS = (
    ("azure", re.compile(rb"\A(\xef\xbb\xbf)?[^\n{]*\bContextTokens\b")),
    ("libra", re.compile(rb'"turns"\s*:')),
    ("kv-cache-tester", re.compile(rb'"requests"\s*:')),
    ("mooncake", re.compile(rb'"(input|output)_length"\s*:')),
)
"""Text that identifies a format; the first match counts."""


class Trace(msgspec.Struct):
    path: Path
    format: str
    trajectories: list[TrajectoryRecord]
    bad: list[str]


def read_trace(path: Path, format: str = AUTO, skip_bad: bool = False, limit: int | None = None) -> Trace:
    """Read the first ``limit`` trajectories (None: all) of a file, or of a folder of kv-cache-tester documents.

    ``format`` is a key of `READERS` or ``"auto"``.  Raises `UserError` for a file that is unreadable, of unknown format
    or without trajectories, and for a bad line unless ``skip_bad``.
    """
    if format not in (AUTO, *READERS):
        raise invalid("format", format, "unknown format", (AUTO, *READERS))
    if limit is not None and limit < 1:
        raise invalid("limit", limit, "out of range", "an integer >= 1")
    trace = Trace(path, format, [], [])
    for file in _files(path):
        content = _content(file)
        kind = _detect(file, content[:HEAD]) if format == AUTO else format
        trace.format = kind
        room = None if limit is None else limit - len(trace.trajectories)
        trace.trajectories.extend(
            itertools.islice(READERS[kind](_lines(content), _bad(file, trace.bad, skip_bad)), room)
        )
        if limit is not None and len(trace.trajectories) >= limit:
            break
    if not trace.trajectories:
        passed = f" that can be read; bad lines: {len(trace.bad)}, the first: {trace.bad[0]}" if trace.bad else ""
        raise UserError(f"{path}: the trace has no trajectory{passed.rstrip('.')}.")
    return trace


def write_trace(path: Path, trajectories: Iterable[TrajectoryRecord]) -> None:
    """Write the project's own format atomically, compressed if the name ends in ``.gz``.

    Equal trajectories give equal bytes.  Raises `UserError` when the file cannot be written.
    """
    data = libra.encode(trajectories)
    if path.suffix == ".gz":
        data = gzip.compress(data, mtime=0)
    write_result(path, data)


def _files(path: Path) -> list[Path]:
    if not os.path.isdir(path):
        return [path]
    try:
        files = sorted(path / name for name in os.listdir(path) if name.endswith((".json", ".json.gz")))
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}).") from error
    if not files:
        raise UserError(f"{path}: the folder has no trace; valid: a file, or a folder of *.json of kv-cache-tester.")
    return files


def _content(path: Path) -> bytes:
    try:
        data = path.read_bytes()
        return gzip.decompress(data) if data.startswith(GZIP) else data
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{path}: the gzip file is damaged ({error}).") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}).") from None


def _lines(content: bytes) -> Iterator[tuple[int, bytes]]:
    for number, line in enumerate(content.split(b"\n"), 1):
        if line.strip():
            yield number, line


def _detect(path: Path, head: bytes) -> str:
    if not head.strip():
        raise UserError(f"{path}: the trace is empty.")
    for name, mark in _MARKS:
        if mark.search(head):
            return name
    raise UserError(f"{path}: of no known format; valid: {', '.join(READERS)} (name one with --format).")


def _bad(path: Path, found: list[str], skip: bool) -> Bad:
    def bad(number: int, problem: str) -> None:
        if not skip:
            raise UserError(f"{path}, line {number}: {problem.rstrip('.')} (--skip-bad goes on without such lines).")
        found.append(f"line {number}: {problem}.")

    return bad
