"""The data order's memory: which prompts are trained, so that none is trained twice and none is left out."""

from __future__ import annotations

from collections.abc import Iterable


class DataOrder:
    """Which prompt indices are trained: everything below `low`, and `extra`."""

    def __init__(self, low: int = 0, extra: Iterable[int] = ()) -> None:
        self.low, self.extra = low, set(extra)

    def trained(self, indices: Iterable[int]) -> None:
        """Mark indices as trained; raises `ValueError` when one already is, which would count it twice."""
        for index in indices:
            if index < self.low or index in self.extra:
                raise ValueError(f"prompt {index} is trained already")
            self.extra.add(index)
        while self.low in self.extra:
            self.extra.remove(self.low)
            self.low += 1
