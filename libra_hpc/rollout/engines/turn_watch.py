"""Deadlines of turns at engines that are themselves alive (limits: `libra_hpc.process.deadlines`).

- Half of the limit has passed -> *slow*, reported once.
- The whole limit has passed -> *abort*, reported once: the engine answers with what it has.
- No answer ``floor_s`` after that -> *lost*: the turn is sent again, as it was.

Times are seconds of any monotonic clock.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal, NamedTuple

from libra_hpc.process.deadlines import LATE_SHARE, DeadlineLimits, Deadlines, Pending

Turn = tuple[str, str]
"""(engine, id of the request)"""


class LateTurn(NamedTuple):
    """A turn that has passed half of its limit, or all of it."""

    action: Literal["slow", "abort", "lost"]
    engine: str
    rid: str
    sentence: str


class TurnWatch:
    """Watches the turns in flight; `evaluate` returns the late ones."""

    def __init__(self, settings: DeadlineLimits) -> None:
        self._deadlines, self._answer_s = Deadlines(settings), settings.floor_s
        self._aborted: dict[Turn, float] = {}
        """When each turn was found to have passed its limit."""

    def sent(self, turn: Turn, now: float) -> None:
        self._deadlines.begin("turn", turn, now)

    def answered(self, turn: Turn, now: float) -> None:
        """End an answered turn; the limits learn from its duration."""
        self._deadlines.end(turn, now)
        self.drop(turn)

    def drop(self, turn: Turn) -> None:
        """Drop a turn; its duration does not count."""
        self._deadlines.drop(turn)
        self._aborted.pop(turn, None)

    def overdue(self, turn: Turn) -> bool:
        return turn in self._aborted

    def discount(self, seconds: float, turns: Collection[Turn] | None = None) -> None:
        """Extend limits by a time in which nobody could read answers; ``turns``: of those that could not go on."""
        self._deadlines.discount(seconds, turns)
        for turn in self._aborted if turns is None else self._aborted.keys() & turns:
            self._aborted[turn] += seconds

    def evaluate(self, now: float) -> list[LateTurn]:
        """Turns that became late since the last call, and *lost* ones until they are dropped."""
        found = [LateTurn("slow", *_turn(pending), pending.sentence) for pending in self._deadlines.late(now)]
        for pending in self._deadlines.pending(now, LATE_SHARE):
            turn = _turn(pending)
            if turn in self._aborted:
                if now - self._aborted[turn] > self._answer_s:
                    found.append(LateTurn("lost", *turn, pending.sentence))
            elif pending.waited_s > pending.limit_s:
                self._aborted[turn] = now
                found.append(LateTurn("abort", *turn, pending.sentence))
        return found


def _turn(pending: Pending) -> Turn:
    turn: Turn = pending.key  # type: ignore[assignment]
    return turn
