"""Writer thread of rank 0 for all that it records and its end: rank 0's loop never waits for a file system.

- A write fails (disk full, quota, I/O error) -> lines wait in memory; retry after `RETRY_S`, doubling to
  `RETRY_MOST_S`.
- More than `MOST_EVENTS` events wait -> the oldest are dropped.  Lines of metrics and Layouts are never dropped.
- Status, result or end cannot be written -> it goes into a `Reserve`, a file whose blocks were allocated before.
- A write takes long -> `slow_s` has its seconds so far.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from libra_hpc.errors import error_text
from libra_hpc.files import write_atomic

from .journal import LineLog
from .rundir import RunDir

RETRY_S, RETRY_MOST_S = 1.0, 10.0
MOST_EVENTS = 20_000
"""About 10 MB; a run writes some thousand events an hour."""
STATUS_BYTES, NODE_BYTES = 128 << 10, 512
"""Size of the status reserve, without the nodes of the run file, and of one of these: with eight engines it has 240."""
RESULT_BYTES = 4 << 10
"""Size of the result's reserve: one message."""


class Reserve:
    """A JSON file that can be replaced on a full disk, as long as it is at most ``size`` bytes.

    Two spare files of that size exist.  On a full disk the content goes into one of them, padded with spaces, and is
    renamed into place.  The replaced file becomes the next spare, once it has that size too.  Without a spare, as on a
    file system without hard links, it is overwritten where it has that size.
    """

    def __init__(self, path: Path, size: int) -> None:
        self._path, self._size = path, size
        self._spares = [path.with_name(f".{path.name}.reserve-{number}") for number in range(2)]
        self._whole = False
        """Whether both were made, and none was used since: no write needs to look at them."""
        self.fault = ""
        """Why the last write needed the reserve; empty: it did not."""
        self._make()

    def write(self, data: bytes) -> None:
        """Replace the file atomically; raises `OSError` when neither the disk nor the reserve takes it."""
        try:
            write_atomic(self._path, data)
        except OSError as error:
            self.fault = f"{self._path} cannot be written: {error_text(error)}"
            usable = (path for path in (*self._spares, self._path) if _size(path) == self._size)
            spare = next(usable, None)
            if len(data) > self._size or spare is None:
                raise
            self._whole = False
            self._write_spare(spare, data)
        else:
            self.fault = ""
            if not self._whole:
                self._make()

    def _write_spare(self, spare: Path, data: bytes) -> None:
        with spare.open("r+b") as file:
            file.write(data.ljust(self._size))
            file.flush()
            os.fsync(file.fileno())
        if spare == self._path:
            return
        replaced = spare.with_name(f"{spare.name}.kept")
        if _size(self._path) == self._size:
            # Without hard links, the next spare is made once there is room.
            with contextlib.suppress(OSError):
                os.link(self._path, replaced)
        spare.replace(self._path)
        if replaced.exists():
            replaced.replace(spare)

    def _make(self) -> None:
        for spare in self._spares:
            # Written, because on some file systems allocation alone reserves nothing.
            with contextlib.suppress(OSError):
                if _size(spare) != self._size:
                    write_atomic(spare, b" " * self._size)
        self._whole = all(_size(spare) == self._size for spare in self._spares)

    def close(self) -> None:
        """Remove the spare files."""
        for spare in self._spares:
            with contextlib.suppress(OSError):
                spare.unlink(missing_ok=True)


def status_reserve(run: RunDir) -> Reserve:
    """The status of a run, with room for all its nodes: the same for its owner and its rank 0."""
    components = run.read_json(run.config).get("components", {}).values()
    nodes = sum(one["nodes"] for one in components if isinstance(one, dict))  # another value is a flag
    return Reserve(run.status, STATUS_BYTES + NODE_BYTES * nodes)


def _size(path: Path) -> int:
    """Bytes of a file; -1 without one."""
    try:
        return path.stat().st_size
    except OSError:
        return -1


class FactsWriter:
    """See the module docstring.  Every method works from any thread and returns at once, except `flush` and `close`."""

    def __init__(self, run: RunDir, attempt: int, taken: Callable[[], str] = str) -> None:
        """``taken()``: why nothing may be written any more, empty while it may; called in the thread."""
        self._taken = taken
        self._events, self._metrics, self._layouts = map(LineLog, (run.events, run.metrics, run.layouts))
        self._status, self._end = status_reserve(run), Reserve(run.ended(attempt), RESULT_BYTES)
        self._lines: dict[LineLog, deque[dict[str, Any]]] = {
            self._metrics: deque(),
            self._layouts: deque(),
            self._events: deque(maxlen=MOST_EVENTS),
        }
        self._documents: dict[Reserve, bytes] = {}
        """What waits to be written; of a document only the newest."""
        self._changed = threading.Condition()
        self._closing = False
        self._busy_since: float | None = None
        self.recorded = 0
        """Highest step whose metrics line is in the file."""
        self.fault = ""
        """Reason of the last failed write; empty while writes succeed."""
        self.fault_since = 0.0
        """Monotonic seconds of the first failure in a row."""
        self._thread = threading.Thread(target=self._run, name="facts", daemon=True)
        self._thread.start()

    def event(self, record: dict[str, Any]) -> None:
        """Append a line to the event log."""
        self._append(self._events, record)

    def step(self, record: dict[str, Any]) -> None:
        """Append a line with a ``step`` to the metrics."""
        self._append(self._metrics, record)

    def layout(self, line: dict[str, Any]) -> None:
        """Append a line of `libra_hpc.facts.layout_log`."""
        self._append(self._layouts, line)

    def status(self, snapshot: bytes) -> None:
        """Replace the status snapshot."""
        self._replace(self._status, snapshot)

    def end(self, content: bytes) -> None:
        """Write why the ranks end, after everything else that can be written."""
        self._replace(self._end, content)

    def _append(self, log: LineLog, record: dict[str, Any]) -> None:
        with self._changed:
            self._lines[log].append(record)
            self._changed.notify_all()

    def _replace(self, document: Reserve, content: bytes) -> None:
        with self._changed:
            self._documents[document] = content
            self._changed.notify_all()

    @property
    def waiting(self) -> int:
        """Lines that are not written yet."""
        return sum(map(len, self._lines.values()))

    def flush(self, patience_s: float) -> bool:
        """Wait until everything is written; False when that took longer than ``patience_s``."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._any() and self._busy_since is None, patience_s)

    def fault_s(self, now: float) -> float:
        """Seconds since writes began to fail, at monotonic time ``now``; 0.0 while they succeed."""
        return max(0.0, now - self.fault_since) if self.fault else 0.0

    def slow_s(self, now: float) -> float:
        """Seconds the write in progress has taken at monotonic time ``now``; 0.0 between writes."""
        since = self._busy_since
        return 0.0 if since is None else max(0.0, now - since)

    def close(self, patience_s: float) -> str:
        """Write what waits, for at most ``patience_s``; returns why something was not written, or an empty text."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(patience_s)
        if self._thread.is_alive():
            return self.fault or f"the file system has not answered for {self.slow_s(time.monotonic()):.0f} s"
        return self.fault

    def _run(self) -> None:
        pause = RETRY_S
        while True:
            with self._changed:
                while not (self._closing or self._any()):
                    self._changed.wait()
                last = self._closing
                self._busy_since = time.monotonic()
            try:
                self._write()
            except OSError as error:
                self.fault_since = self.fault_since if self.fault else time.monotonic()
                self.fault = f"{error.strerror or error} ({error.filename or 'run directory'})"
            else:
                self.fault, pause = "", RETRY_S
            with self._changed:
                self._busy_since = None
                self._changed.notify_all()
            if last:
                return
            if self.fault:
                with self._changed:
                    self._changed.wait_for(lambda: self._closing, pause)
                pause = min(2 * pause, RETRY_MOST_S)

    def _any(self) -> bool:
        return bool(self.waiting or self._documents)

    def _write(self) -> None:
        """Write the status first, and the end last: their reserves have room even on a full disk."""
        if self._taken():
            with self._changed:
                self._documents.clear()
                for lines in self._lines.values():
                    lines.clear()
            return
        failure: OSError | None = None
        for part in (self._status, self._metrics, self._layouts, self._events, self._end):
            try:
                if isinstance(part, LineLog):
                    self._write_lines(part)
                else:
                    self._write_document(part)
            except OSError as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def _write_document(self, document: Reserve) -> None:
        content = self._documents.get(document)
        if content is not None:
            document.write(content)
            with self._changed:
                if self._documents[document] is content:
                    del self._documents[document]

    def _write_lines(self, log: LineLog) -> None:
        waiting = self._lines[log]
        with self._changed:
            lines = list(waiting)
        log.write_all(lines)
        with self._changed:
            for line in lines:
                # The oldest ones may have been dropped meanwhile.
                if waiting and waiting[0] is line:
                    waiting.popleft()
        if log is self._metrics:
            self.recorded = max([self.recorded, *(int(line.get("step", 0)) for line in lines)])
