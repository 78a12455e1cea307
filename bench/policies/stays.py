"""Three rules of common balancers that never leave an engine: `round_robin`, `least_live` and `cache_aware`.

- A later turn -> the engine of the last turn; where that is full, it waits for it.
- A first turn -> the next engine in turn (`round_robin`), or the one with the fewest live trajectories (`least_live`).
- A first turn of `cache_aware`, SGLang's router -> the engine that had this prompt; a new prompt -> the one with the
  fewest prompts.  Where the fullest has `MORE_TURNS` more than the emptiest, and `MORE` times as many -> the emptiest.
"""

from __future__ import annotations

from collections import Counter

from libra_hpc.policies.scheduling.board import Board, EngineView
from libra_hpc.policies.scheduling.protocol import Decision, TurnView
from libra_hpc.policies.scheduling.rules import LiveTrajectories, Rule, eligible, wait

MORE_TURNS, MORE = 64, 1.5
"""SGLang's ``balance_abs_threshold`` and ``balance_rel_threshold``."""


class LeastLive(Rule):
    """Fewest live trajectories, tool time included, then stay."""

    name = "least_live"

    def __init__(self) -> None:
        self._live = LiveTrajectories()

    def route(self, turn: TurnView, board: Board, now: float) -> Decision:
        last = board.engines.get(turn.engine)
        if last is not None and last.open and last.kv_capacity >= turn.context_tokens:
            if not last.free:
                words, numbers = "wait: {engine} ran the last turn and is full", {"engine": last.engine}
                return Decision(engine="", priority=0, level=0, template=words, numbers=numbers, wait="last")
            chosen, reason = last, "{engine} ran the last turn"
        else:
            free = eligible(turn, board)
            if not free:
                return wait(board)
            self._live.drop(turn.trajectory)
            chosen, reason = self.first(turn, free), f"{{engine}} by {self.name}"
        self._live.put(turn.trajectory, chosen.engine)
        numbers = {"engine": chosen.engine}
        return Decision(engine=chosen.engine, priority=0, level=chosen.level, template=reason, numbers=numbers)

    def first(self, turn: TurnView, free: list[EngineView]) -> EngineView:
        """The engine of a first turn."""
        return min(free, key=self._live.count)

    def forget(self, trajectory: str) -> None:
        self._live.drop(trajectory)


class RoundRobin(LeastLive):
    """The next engine in turn, then stay."""

    name = "round_robin"

    def __init__(self) -> None:
        super().__init__()
        self._sent: Counter[str] = Counter()

    def first(self, turn: TurnView, free: list[EngineView]) -> EngineView:
        chosen = min(free, key=lambda e: self._sent[e.engine])
        self._sent[chosen.engine] += 1
        return chosen


class CacheAware(LeastLive):
    """The engine that had the prompt last, unless the engines are unbalanced; then stay."""

    name = "cache_aware"

    def __init__(self) -> None:
        super().__init__()
        self._prompts: dict[str, str] = {}
        self._kept: Counter[str] = Counter()

    def first(self, turn: TurnView, free: list[EngineView]) -> EngineView:
        least = min(free, key=lambda e: e.inflight)
        most = max(e.inflight for e in free)
        if most - least.inflight > MORE_TURNS and most > MORE * least.inflight:
            return least
        known = next((e for e in free if e.engine == self._prompts.get(turn.prompt_id)), None)
        chosen = known or min(free, key=lambda e: self._kept[e.engine])
        if known is None:
            self._prompts[turn.prompt_id] = chosen.engine
            self._kept[chosen.engine] += 1
        return chosen
