"""What a lender or guest gave since the ranks started, for `status` and `report`.

Engines of one that was there before go on counting: a lender's next guest has another rank.
"""

from __future__ import annotations

from statistics import fmean

from libra_hpc.protocol.agents import LenderReport
from libra_hpc.protocol.engine_state import LenderKind


class LenderTotals:
    """Seconds are those of engines."""

    def __init__(self, name: str, kind: LenderKind) -> None:
        self.name, self.kind = name, kind
        self.turns = self.tokens = 0
        self.shares: dict[str, float] = {}
        """Share of the time that each present engine can step."""
        self.present_s = 0.0
        self.paused: dict[str, float] = {}
        self.closed: dict[str, str] = {}
        """Why each engine that is paused now is."""

    def came(self, engine: str) -> None:
        self.shares[engine] = 1.0

    def passed(self, engine: str, seconds: float, closed_s: float, share: float, why: str) -> None:
        """An engine was there for so long, and could not step for a part of it."""
        self.present_s, self.shares[engine] = self.present_s + seconds, share
        if closed_s > 0.0:
            self.paused[why] = self.paused.get(why, 0.0) + closed_s

    def turned(self, engine: str, closed: bool, why: str) -> None:
        """Whether an engine is paused now."""
        self.closed.pop(engine, None)
        if closed:
            self.closed[engine] = why

    def gone(self, engine: str) -> None:
        self.shares.pop(engine, None)
        self.closed.pop(engine, None)

    def report(self) -> LenderReport:
        open_s = self.present_s - sum(self.paused.values())
        return LenderReport(
            name=self.name,
            kind=self.kind,
            engines=len(self.shares),
            share=fmean(self.shares.values()) if self.shares else 0.0,
            mean_share=open_s / self.present_s if self.present_s > 0.0 else 1.0,
            turns=self.turns,
            tokens=self.tokens,
            paused={why: round(seconds, 1) for why, seconds in self.paused.items()},
            now=next(iter(self.closed.values()), "") if len(self.closed) == len(self.shares) else "",
        )
