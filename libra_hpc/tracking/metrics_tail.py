"""New steps of a metrics file that grows, is cut back when a run restarts, and grows again."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from libra_hpc.facts.rundir import parse


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
