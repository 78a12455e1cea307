"""Causal signals as symbols: the structure of what a tool answered, never a word of it.

A symbol is (tool, outcome, tests, payload class, repeat class):

* *outcome*: what the task declared.  A declared ``ok`` of a process that exited with a code other than 0 is an
  ``error``: the exit code is a fact, ``ok`` may be a default.  Any other declared class (``timeout``, ``error``, the
  task's own) stands.
* *tests*: empty when none ran; ``all``, ``some`` or ``none`` passed; when some fail, ``-`` is appended when fewer fail
  than in the trajectory's last run, ``=`` when not, nothing on the first run.
* *payload class*: 0, 1, 2 for at most `SMALL_PAYLOAD` = 128, at most `LARGE_PAYLOAD` = 1024, more tokens (about 500 and
  4,000 characters).
* *repeat class*: how many equal (tool, outcome, tests) came right before: 0, 1, or 2 for more.

Symbols are numbered by a `Vocabulary`, so that contexts of several symbols are plain integers.  It holds `MAX_SYMBOLS`
= 1023 of them; what comes later shares number 0, which then means "anything unusual".
"""

from __future__ import annotations

from typing import Final

from libra_hpc.protocol.env import Signal

SMALL_PAYLOAD: Final = 128
LARGE_PAYLOAD: Final = 1024
MAX_SYMBOLS: Final = 1023

Symbol = tuple[str, str, str, int, int]


class SignalState:
    """What of a trajectory's past its next symbol depends on."""

    __slots__ = ("failed", "last", "repeats")

    def __init__(self) -> None:
        self.failed: int | None = None
        """Failing tests of the last run."""
        self.last = ("", "", "")
        self.repeats = 0

    def read(self, signal: Signal) -> Symbol:
        """The symbol of the next signal; the state moves on."""
        outcome, tests, size = signal.outcome, "", signal.payload_tokens
        if signal.exit_code and outcome == "ok":
            outcome = "error"
        if signal.passed is not None or signal.failed is not None:
            passed, failed = signal.passed or 0, signal.failed or 0
            if not failed and passed:
                tests = "all"
            else:
                tests = "some" if passed else "none"
                if self.failed is not None:
                    tests += "-" if failed < self.failed else "="
            self.failed = failed
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


class Vocabulary:
    """Numbers symbols from 1; see the module."""

    __slots__ = ("_numbers", "symbols")

    def __init__(self) -> None:
        self._numbers: dict[Symbol, int] = {}
        self.symbols: list[Symbol] = [("", "", "", 0, 0)]
        """Symbol of each number."""

    def number(self, symbol: Symbol) -> int:
        """The symbol's number, a new one when it is new and there is room, else 0."""
        known = self._numbers.get(symbol)
        if known is not None:
            return known
        if len(self._numbers) >= MAX_SYMBOLS:
            return 0
        self._numbers[symbol] = number = len(self._numbers) + 1
        self.symbols.append(symbol)
        return number
