"""A change is made once a later step asks for it again."""

from __future__ import annotations

SURE = 0.25
"""Gain that needs no confirmation. Half: noise of short batches moves nodes; double: a wrong start costs a step more.
"""
MUST = "a later step must confirm this first"


class Confirmation:
    """Keeps the one change that waits; steps are counted down to the end of the run."""

    def __init__(self) -> None:
        self._what = ""
        self._steps_left = 0

    @property
    def waits(self) -> bool:
        return bool(self._what)

    def given(self, what: str, gain: float, steps_left: int, wait: int = 1) -> bool:
        """Whether ``what`` may be done: it gains much, or was asked for ``wait`` steps ago and ever since."""
        if what != self._what:
            self._what, self._steps_left = what, steps_left
        return gain >= SURE or self._steps_left - steps_left >= wait

    def drop(self) -> None:
        """Nothing is asked for."""
        self._what = ""
