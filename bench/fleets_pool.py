"""Calls of pure functions over processes, kept in a file.

A finished call is one line of the file. The same call of the same row and sources is not made again, so a judge that
was ended goes on where it was, on another machine, too. Results do not depend on the number of processes or the order
of calls, because no call knows of another.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

import msgspec

from bench.fleets_rows import setting_of
from bench.harness import ROOT

ROOMS = ("models", "planning", "policies", "simulator", "traces")
SOURCES = ("bench/policies", *(f"libra_hpc/{room}" for room in ROOMS))
"""Folders on which results depend, beside the rows and the search."""


class Call(NamedTuple):
    row: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]

    @property
    def key(self) -> str:
        return json.dumps([_sources(), setting_of(self.row), self.function.__name__, *self.arguments])


class Calls:
    """The processes; ``keep``: the file."""

    def __init__(self, processes: int, keep: Path | None = None) -> None:
        self._kept: dict[str, Any] = {}
        if keep is not None:
            keep.parent.mkdir(parents=True, exist_ok=True)
            self._kept = _whole_lines(keep)
        self._file = None if keep is None else keep.open("a", buffering=1)
        self._pool = ProcessPoolExecutor(processes)
        # Forks all processes before there are threads.
        self._pool.submit(time.time).result()

    def __enter__(self) -> Calls:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        if self._file is not None:
            self._file.close()

    def row(self, name: str) -> Executor:
        """An executor whose calls are those of a row."""
        return _Row(self, name)

    def submit(self, call: Call) -> Future[Any]:
        if call.key in self._kept:
            future: Future[Any] = Future()
            future.set_result(msgspec.convert(self._kept[call.key], get_type_hints(call.function)["return"]))
            return future
        made = self._pool.submit(call.function, *call.arguments)
        made.add_done_callback(partial(self._done, call.key, time.monotonic()))
        return made

    def _done(self, key: str, asked: float, made: Future[Any]) -> None:
        """Only the pool's own thread calls this, so lines are whole."""
        if self._file is not None and not made.cancelled() and not made.exception():
            self._file.write(json.dumps([key, made.result(), round(time.monotonic() - asked, 1)]) + "\n")


class _Row(Executor):
    def __init__(self, calls: Calls, name: str) -> None:
        self._calls, self._name = calls, name

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        assert not kwargs
        return self._calls.submit(Call(self._name, fn, args))


@lru_cache(maxsize=1)
def _sources() -> str:
    files = [path for folder in SOURCES for path in (ROOT / folder).rglob("*.py")]
    files += (ROOT / "bench").glob("fleets_*.py")
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(files))).hexdigest()[:8]


def _whole_lines(path: Path) -> dict[str, Any]:
    """Results by call; cuts off a last line that was not written to its end."""
    text = path.read_bytes() if path.exists() else b""
    whole = text[: text.rfind(b"\n") + 1]
    path.write_bytes(whole)
    return {key: result for key, result, _ in map(json.loads, whole.splitlines())}
