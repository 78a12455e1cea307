"""How much of a borrowed engine there is: its share of the time.

- It is open or paused for some seconds -> `share` follows, the newest `SHARE_S` count most.
- A turn stands still for longer than its prefill elsewhere takes (at most `STAND_S`), and than its engine's `Pauses`
  say -> it goes elsewhere.

Pure.  Without a borrowed engine nothing here is used.
"""

from __future__ import annotations

from math import exp
from typing import Final

from libra_hpc.policies.serving.pauses import STAND_S, Pauses

from .board import Board

SHARE_S: Final = 120.0
"""Seconds.  Half: a burst is taken for the usual state; double: a busy hour is noticed late."""
LEAST_SHARE: Final = 0.02


class Availability(Pauses):
    """Availability of one borrowed engine; at first it counts as always there."""

    def __init__(self) -> None:
        super().__init__()
        self.share = 1.0

    def patience_s(self, board: Board, context: int) -> float:
        """Seconds that a turn of so many tokens may stand still here."""
        return self.waits_s(prefill_s(board, context))

    def passed(self, seconds: float, is_open: bool) -> None:
        """It was open, or paused, for so long."""
        if seconds <= 0.0:
            return
        keep = exp(-seconds / SHARE_S)
        self.share = max(LEAST_SHARE, keep * self.share + (1.0 - keep) * is_open)


def prefill_s(board: Board, context: int) -> float:
    """Seconds of the prefill of so many tokens at an own engine; at most `STAND_S`."""
    own = [tp_class.prefill_s for tp_class in board.classes if any(not view.borrowed for view in tp_class.members)]
    return min(STAND_S, context * min(own)) if own else STAND_S
