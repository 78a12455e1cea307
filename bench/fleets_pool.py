"""Calls of pure functions over processes: most valuable first, kept in a file, until a time limit.

- Rows of `bench.fleets` run at the same time, each in a thread. `Calls.row` is the executor of one: where processes are
  scarce, calls of an earlier row go first.
- A finished call is one line of the file. The same call of the same row and sources is not made again, so a judge that
  was ended goes on where it was, on another machine, too.
- At the time limit processes are ended, and all that wait for a call get `OutOfTimeError`.

Results depend neither on the number of processes nor on the order of calls, because no call knows of another.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Executor, Future, ProcessPoolExecutor
from functools import lru_cache, partial
from itertools import count
from pathlib import Path
from threading import RLock, Timer
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


class OutOfTimeError(Exception):
    pass


class Calls:
    """``keep``: the file; ``limit_s``: 0 is none."""

    def __init__(self, processes: int, keep: Path | None = None, limit_s: float = 0.0) -> None:
        self._lock, self._order = RLock(), count()
        self._waiting: list[tuple[int, int, Call, Future[Any]]] = []
        self._running: set[Future[Any]] = set()
        self._free = processes
        self.over = False
        self.made = 0
        """Calls that were not kept."""
        self._kept: dict[str, Any] = {}
        if keep is not None:
            keep.parent.mkdir(parents=True, exist_ok=True)
            self._kept = _whole_lines(keep)
        self._file = None if keep is None else keep.open("a", buffering=1)
        self._pool = ProcessPoolExecutor(processes)
        # Forks all processes before there are threads.
        self._pool.submit(time.time).result()
        self._timer = Timer(limit_s, self._end)
        self._timer.daemon = True
        if limit_s:
            self._timer.start()

    def __enter__(self) -> Calls:
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        self._pool.shutdown(wait=not self.over, cancel_futures=True)
        if self._file is not None:
            self._file.close()

    def row(self, place: int, name: str) -> Executor:
        """Executor of the row at that place; lower ones go first."""
        return _Row(self, place, name)

    def submit(self, place: int, call: Call) -> Future[Any]:
        future: Future[Any] = Future()
        with self._lock:
            if call.key in self._kept:
                future.set_result(msgspec.convert(self._kept[call.key], get_type_hints(call.function)["return"]))
            elif self.over:
                future.set_exception(OutOfTimeError())
            else:
                heapq.heappush(self._waiting, (place, next(self._order), call, future))
                self._start()
        return future

    def _start(self) -> None:
        while self._free and self._waiting:
            *_, call, future = heapq.heappop(self._waiting)
            if future.set_running_or_notify_cancel():
                self._free -= 1
                self._running.add(future)
                made = self._pool.submit(call.function, *call.arguments)
                made.add_done_callback(partial(self._done, call, future, time.monotonic()))

    def _done(self, call: Call, future: Future[Any], begun: float, made: Future[Any]) -> None:
        with self._lock:
            self._running.discard(future)
            if future.done():
                return
            self._free += 1
            try:
                result = made.result()
            except (Exception, CancelledError) as error:
                future.set_exception(error)
            else:
                self.made += 1
                if self._file is not None:
                    self._file.write(json.dumps([call.key, result, round(time.monotonic() - begun, 1)]) + "\n")
                future.set_result(result)
            self._start()

    def _end(self) -> None:
        with self._lock:
            self.over = True
            waiting = [one for *_, one in self._waiting if one.set_running_or_notify_cancel()]
            for future in (*self._running, *waiting):
                future.set_exception(OutOfTimeError())
            self._waiting = []
        for process in multiprocessing.active_children():
            process.kill()


class _Row(Executor):
    def __init__(self, calls: Calls, place: int, name: str) -> None:
        self._calls, self._place, self._name = calls, place, name

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        assert not kwargs
        return self._calls.submit(self._place, Call(self._name, fn, args))


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
