"""Tool results as symbols: the structure of an answer, never its text.

A symbol is (tool, outcome, tests, payload class, repeat class):

- *outcome*: as the task declares it.  ``ok`` with an exit code other than 0 becomes ``error``.
- *tests*: empty if none ran, else ``all``, ``some`` or ``none`` passed.  When some fail, ``-`` follows if fewer fail
  than in the last run, ``=`` if not; nothing on the first run.
- *payload class*: 0, 1, 2 for up to `SMALL_PAYLOAD`, up to `LARGE_PAYLOAD`, and more tokens.
- *repeat class*: number of equal (tool, outcome, tests) right before, at most 2.
"""

from __future__ import annotations

from typing import Final

from libra_hpc.protocol.env import Signal

SMALL_PAYLOAD: Final = 128
"""Tokens: about 500 characters."""
LARGE_PAYLOAD: Final = 1024
"""Tokens: about 4,000 characters."""
MAX_SYMBOLS: Final = 1023
"""Numbered symbols; later ones share the number 0."""

Symbol = tuple[str, str, str, int, int]


class SignalState:
    """What the next symbol of a trajectory depends on."""

    def __init__(self) -> None:
        self.failed: int | None = None
        """Failing tests of the last run."""
        self.last = ("", "", "")
        self.repeats = 0

    def read(self, signal: Signal) -> Symbol:
        """The symbol of the next signal; updates the state."""
        outcome, tests, size = signal.outcome, "", signal.payload_tokens
        if signal.exit_code and outcome == "ok":
            outcome = "error"
        if signal.passed is not None or signal.failed is not None:
            tests = self._tests(signal.passed or 0, signal.failed or 0)
        key = (signal.tool, outcome, tests)
        if key == self.last:
            if self.repeats < 2:
                self.repeats += 1
        else:
            self.last, self.repeats = key, 0
        return (
            signal.tool,
            outcome,
            tests,
            0 if size <= SMALL_PAYLOAD else 1 if size <= LARGE_PAYLOAD else 2,
            self.repeats,
        )

    def _tests(self, passed: int, failed: int) -> str:
        before, self.failed = self.failed, failed
        if passed and not failed:
            return "all"
        some = "some" if passed else "none"
        if before is None:
            return some
        return some + ("-" if failed < before else "=")


class Vocabulary:
    """Numbers symbols from 1."""

    def __init__(self) -> None:
        self._numbers: dict[Symbol, int] = {}

    def number(self, symbol: Symbol) -> int:
        """The number of a symbol; 0 if it is new and `MAX_SYMBOLS` are numbered."""
        known = self._numbers.get(symbol)
        if known is not None:
            return known
        if len(self._numbers) >= MAX_SYMBOLS:
            return 0
        self._numbers[symbol] = number = len(self._numbers) + 1
        return number
