"""When a lost node that sends again is taken back: pure, times are epoch seconds.

- Lost for the first time within `MEMORY_S` -> taken back at its next heartbeat.
- Lost again -> only after `PROVE_S` of heartbeats without a gap, from the third loss on twice as long.
- Lost `MOST` times within `MEMORY_S` -> quarantined: this start of the ranks goes on without it.
"""

from __future__ import annotations

from typing import Literal

MEMORY_S = 3600.0
"""Half: a node that flaps every twenty minutes always comes back; double: two faults of a day count together."""
PROVE_S = 30.0
"""A start of engines takes about as long.  Half: a node that is on for 20 s at a time costs its turns each time.
Double: its agent, which hears nothing meanwhile, leaves after 90 s."""
MOST = 5
"""Losses; with the proofs a node that flaps is quarantined after some five minutes at the earliest."""
GAP_S = 5.0
"""Between two heartbeats, which come every second."""

Answer = Literal["wait", "take", "quarantine"]


class Readmission:
    def __init__(self) -> None:
        self._losses: dict[int, list[float]] = {}
        self._seen: dict[int, tuple[float, float]] = {}
        """First and last heartbeat of a lost node, without a gap between them."""
        self.out: dict[int, str] = {}
        """Nodes in quarantine, and why."""

    def sentences(self) -> list[str]:
        """The nodes in quarantine."""
        return [self.out[rank] for rank in sorted(self.out)]

    def lost(self, rank: int, now: float) -> None:
        recent = [at for at in self._losses.get(rank, []) if now - at < MEMORY_S]
        self._losses[rank] = [*recent, now]
        self._seen.pop(rank, None)

    def seen(self, rank: int, now: float) -> Answer:
        """A lost node gave a sign of life; ``quarantine`` is answered once, then ``wait`` for ever."""
        count = len(self._losses.get(rank, []))
        if rank in self.out:
            return "wait"
        if count >= MOST:
            self.quarantine(rank, f"lost {MOST} times in an hour")
            return "quarantine"
        first, last = self._seen.get(rank, (now, now))
        first = now if now - last > GAP_S else first
        self._seen[rank] = (first, now)
        return "take" if count < 2 or now - first >= PROVE_S * min(count - 1, 2) else "wait"

    def quarantine(self, rank: int, why: str) -> str:
        """Take a node back no more; returns the sentence."""
        self.out[rank] = f"node {rank} is quarantined: {why}"
        return self.out[rank]
