"""Busy time of an engine over the run, in at most `BINS` equal bins: when they are full, pairs are merged."""

from __future__ import annotations

BINS = 512
"""Most bins: more than a picture has columns."""
FIRST_S = 0.125
"""Width of a bin at the start, seconds; a power of two, so that doubled widths are exact."""


class Timeline:
    """Per bin: `busy` seconds, and `load`, seconds times the number of running sequences."""

    def __init__(self) -> None:
        self.width_s = FIRST_S
        self.busy: list[float] = []
        self.load: list[float] = []

    def add(self, start: float, end: float, weight: float) -> None:
        """``weight`` sequences ran from ``start`` to ``end`` (seconds since the start of the run)."""
        while end > BINS * self.width_s:
            self._merge()
        width = self.width_s
        first, last = int(start / width), int(end / width)
        missing = last + 1 - len(self.busy)
        if missing > 0:
            self.busy += [0.0] * missing
            self.load += [0.0] * missing
        if first == last:
            self.busy[first] += end - start
            self.load[first] += (end - start) * weight
            return
        for place in range(first, last + 1):
            seconds = min(end, (place + 1) * width) - max(start, place * width)
            self.busy[place] += seconds
            self.load[place] += seconds * weight

    def segments(self) -> list[tuple[float, float, float]]:
        """(start, end, mean weight) of every bin that was busy at all; neighbours of equal weight are merged."""
        out: list[tuple[float, float, float]] = []
        for place, (busy, load) in enumerate(zip(self.busy, self.load, strict=True)):
            if busy <= 0.0:
                continue
            start, mean = place * self.width_s, round(load / self.width_s, 2)
            if out and out[-1][1] == start and out[-1][2] == mean:
                out[-1] = (out[-1][0], start + self.width_s, mean)
            else:
                out.append((start, start + self.width_s, mean))
        return out

    def _merge(self) -> None:
        self.width_s *= 2.0
        for series in (self.busy, self.load):
            series[:] = [sum(series[i : i + 2]) for i in range(0, len(series), 2)]
