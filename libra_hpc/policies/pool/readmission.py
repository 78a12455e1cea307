"""When a lost node that sends again is taken back: pure, times are epoch seconds.

- Lost for the first time within `MEMORY_S` -> taken back at its next heartbeat.
- Lost again -> only after `PROVE_S` of heartbeats without a gap, from the third loss on twice as long.
- Lost `MOST` times within `MEMORY_S` -> quarantined: this start of the ranks goes on without it.
- Silent for `SILENT_S`, `SILENCES` times within `WITHIN_S`, and never long enough to be lost -> quarantined, too.
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
SILENT_S = 10.0
"""Half of the silence that loses a node.  Half: long pauses of a loaded machine count; double: only losses would."""
SILENCES, WITHIN_S = 6, 600.0
"""Half: a node pays for one bad minute.  Double: 12 s off and 5 s on cost its turns three minutes longer."""

Answer = Literal["wait", "take", "quarantine"]


class Readmission:
    def __init__(self) -> None:
        self._losses: dict[int, list[float]] = {}
        self._seen: dict[int, tuple[float, float]] = {}
        """First and last heartbeat of a lost node, without a gap between them."""
        self._silences: dict[int, list[float]] = {}
        """When each silence of a node that was not lost reached `SILENT_S`."""
        self.out: dict[int, str] = {}
        """Nodes in quarantine, and why."""

    def sentences(self) -> list[str]:
        """The nodes in quarantine."""
        return [self.out[rank] for rank in sorted(self.out)]

    def silent(self, rank: int, since: float, now: float) -> str:
        """Note the silence of a node that is not lost; returns why it is to be quarantined, else nothing."""
        times = self._silences.setdefault(rank, [])
        if now - since < SILENT_S or (times and times[-1] >= since):
            return ""
        self._silences[rank] = times = [*(at for at in times if now - at < WITHIN_S), now]
        if len(times) < SILENCES:
            return ""
        return f"silent for more than {SILENT_S:.0f} s, {SILENCES} times within {now - times[0]:.0f} s"

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
