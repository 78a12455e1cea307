"""Which prompts are trained: none twice, none left out."""

from __future__ import annotations

from collections.abc import Iterable


class DataOrder:
    """Trained prompt indices: all below `low`, and those in `extra`."""

    def __init__(self, low: int = 0, extra: Iterable[int] = ()) -> None:
        self.low, self.extra = low, set(extra)

    def has(self, index: int) -> bool:
        """Whether the prompt is trained."""
        return index < self.low or index in self.extra

    def trained(self, indices: Iterable[int]) -> None:
        for index in indices:
            if self.has(index):
                raise ValueError(f"prompt {index} is trained already")
            self.extra.add(index)
        while self.low in self.extra:
            self.extra.remove(self.low)
            self.low += 1
