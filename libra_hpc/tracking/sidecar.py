"""Sends the metrics of a run to its trackers, from the file that the run writes.

``python -m libra_hpc.tracking RUN [--once]``, until SIGTERM or the death of the process that started it. It may be
killed and started again at any time, also after the run: `Sent` has the steps each tracker has. A tracker that fails
is left alone for `RETRY_S`; the run never waits for one.  The file grows, is cut back when a run restarts, and grows
again (`MetricsTail`).
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from libra_hpc.config.load import load_resolved
from libra_hpc.errors import UserError
from libra_hpc.facts.rundir import RunDir, parse, read_lines
from libra_hpc.facts.series import EVALUATED

from .trackers import Tracker, trackers


class MetricsStep(NamedTuple):
    """One step, or that the steps behind ``step`` are trained again."""

    step: int
    values: dict[str, float]
    line: int
    """Checksum of the step's line."""
    again: bool = False


class MetricsTail:
    """Reads from the file's start; steps up to ``sent`` are known already, whose line had the checksum ``line``."""

    def __init__(self, path: Path, sent: int = 0, line: int = 0) -> None:
        self._path, self._sent, self._line = path, sent, line
        self._known: list[tuple[int, int]] = []
        """(step, checksum of its line) of every line that was read, in order."""
        self._end, self._last = 0, b""
        """Bytes that were read, and the last line among them."""

    def new(self) -> Iterator[MetricsStep]:
        """Steps since the last call, in order; where earlier ones are trained again, first the step before them."""
        try:
            handle = self._path.open("rb")
        except FileNotFoundError:
            return
        with handle:
            if self._line and self._line not in map(zlib.crc32, handle):
                # Cut back while nobody looked, nobody knows how far.
                self._sent = 0
                yield MetricsStep(0, {}, 0, again=True)
            known = self._line = 0
            handle.seek(self._end - len(self._last))
            if handle.read(len(self._last)) == self._last:
                known = len(self._known)
            else:
                handle.seek(0)
                self._end, self._last = 0, b""
            for line in handle:
                if not line.endswith(b"\n"):
                    return
                self._end += len(line)
                self._last = line
                mark = zlib.crc32(line)
                if known < len(self._known):
                    if self._known[known][1] == mark:
                        known += 1
                        continue
                    yield from self._back(known)
                known += 1
                values = numbers(line)
                step = int(values.get("step", 0))
                self._known.append((step, mark))
                if step > self._sent:
                    self._sent = step
                    yield MetricsStep(step, values, mark)
            if known < len(self._known):
                yield from self._back(known)

    def _back(self, known: int) -> Iterator[MetricsStep]:
        """The file has other lines behind its first ``known``."""
        del self._known[known:]
        before, mark = self._known[-1] if self._known else (0, 0)
        if before < self._sent:
            self._sent = before
            yield MetricsStep(before, {}, mark, again=True)


def numbers(line: bytes) -> dict[str, float]:
    """The numbers of a line of metrics."""
    return {key: float(value) for key, value in parse(line).items() if isinstance(value, int | float)}


POLL_S, RETRY_S = 2.0, 60.0


class Sent:
    """The last step that each tracker has, the checksum of its line, and how many evaluations, in
    ``track/sent.json``."""

    def __init__(self, run: RunDir) -> None:
        self._run, self._path = run, run.path / "track" / "sent.json"
        self._kept: dict[str, list[int]] = run.read_json(self._path)

    def last(self, name: str) -> tuple[int, int]:
        step, line = self._kept.get(name, (0, 0))[:2]
        return step, line

    def evaluated(self, name: str) -> int:
        """How many lines of evaluations it has."""
        return (*self._kept.get(name, ()), 0, 0, 0)[2]

    def record(self, name: str, step: int, line: int, evaluated: int) -> None:
        if self._kept.get(name) != [step, line, evaluated]:
            self._kept[name] = [step, line, evaluated]
            self._path.parent.mkdir(exist_ok=True)
            self._run.write_json(self._path, self._kept)


class Feed:
    """One tracker and what it has of the metrics."""

    def __init__(self, tracker: Tracker, run: RunDir, sent: Sent) -> None:
        self.tracker, self._run, self._sent = tracker, run, sent
        self._last, self._evaluated = sent.last(tracker.name), sent.evaluated(tracker.name)
        self._tail = MetricsTail(run.metrics, *self._last)

    def pass_on(self) -> None:
        """Send what is new; after an exception of the tracker the next call begins with the step that failed."""
        try:
            for entry in self._tail.new():
                if entry.again:
                    self._last = (entry.step, entry.line) if self.tracker.again(entry.step) else self._last
                elif entry.step > self._last[0]:
                    self.tracker.send(entry.step, entry.values)
                    self._last = entry.step, entry.line
            self._evaluations()
        except Exception:
            self._tail = MetricsTail(self._run.metrics, *self._last)
            raise
        finally:
            self.tracker.flush()
            self._sent.record(self.tracker.name, *self._last, self._evaluated)

    def _evaluations(self) -> None:
        """Send those that have ended, at the newest step: a tracker may take no older one."""
        lines = list(read_lines(self._run.evaluations))
        for line in lines[self._evaluated :]:
            name, known = f"{EVALUATED}{line['task']}", {"": "mean", "/step": "step", "/stderr": "stderr"}
            values = {name + end: float(line[key]) for end, key in known.items() if key in line}
            passed = {f"{name}/pass@{k}": share for k, share in line.get("pass_at", {}).items()}
            self.tracker.send(self._last[0], values | passed)
            self._evaluated += 1


def follow(run: RunDir, over: Callable[[], bool], sleep: Callable[[float], object] = time.sleep) -> list[str]:
    """Send until ``over()``; returns the names of the trackers.  Raises `UserError` where a library is missing."""
    config, sent = load_resolved(run.config), Sent(run)
    feeds = {
        tracker.name: Feed(tracker, run, sent) for tracker in trackers(run, config, lambda name: sent.last(name)[0])
    }
    wait_until = dict.fromkeys(feeds, 0.0)
    while feeds:
        # What is written before the end is read after it.
        last = over()
        for name, feed in feeds.items():
            if time.monotonic() < wait_until[name] and not last:
                continue
            if not _done(name, feed.pass_on):
                wait_until[name] = time.monotonic() + RETRY_S
        if last:
            break
        sleep(POLL_S)
    for name, feed in feeds.items():
        _done(name, feed.tracker.close)
    return list(feeds)


def _done(name: str, call: Callable[[], None]) -> bool:
    """Whether a call of a tracker raised nothing; what it raised is in the log."""
    try:
        call()
    except Exception as error:  # of a library that we do not know
        print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return False
    return True


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Send the metrics of a run to its trackers until it has ended.")
    parser.add_argument("run", help="run directory")
    parser.add_argument("--once", action="store_true", help="send what is there, and end")
    options = parser.parse_args(arguments)
    run = RunDir(options.run)
    ended, parent = threading.Event(), os.getppid()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    try:
        if not follow(run, lambda: options.once or ended.is_set() or os.getppid() != parent, ended.wait):
            raise UserError(f"{run.path} has no tracker; its run file sets none in [track].")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0
