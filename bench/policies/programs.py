"""Rules of 2026 that admit whole trajectories (*programs*): `fit`, `thunder_agent` and `program_age`; and `kv_router`.

- `fit`: the oldest trajectories of an engine whose contexts fit `PAUSE_AT` of its cache stay; another one loses its
  place.  A new one goes to the engine with the most room, if it fits `START_AT` there.
- `thunder_agent` (arXiv 2602.13692, also in NVIDIA Dynamo): as `fit`, but the smallest idle ones lose their places, and
  the smallest gets one first.
- `program_age`: turns in the order in which their trajectories began.  A new one starts at the engine with the fewest,
  while that uses less than `PAUSE_AT` of its cache; then it stays, and nobody loses a place.
- `kv_router`, NVIDIA Dynamo's cost: the fewest tokens to prefill and in flight, wherever the last turn was.
"""

from __future__ import annotations

from collections import defaultdict

from libra_hpc.policies.scheduling.board import Board, EngineView
from libra_hpc.policies.scheduling.protocol import Decision, TurnView, Wait
from libra_hpc.policies.scheduling.rules import Rule, eligible, send, wait

START_AT, PAUSE_AT = 0.8, 0.9
"""Shares of a KV cache."""


def wait_for(what: Wait, engine: str = "") -> Decision:
    """The decision to wait for a slot of the last engine, or for room."""
    return Decision(engine="", priority=0, level=0, template=f"wait: {what}", numbers={"engine": engine}, wait=what)


class Fit(Rule):
    """Whole trajectories have places at engines, the oldest first."""

    name = "fit"

    def __init__(self) -> None:
        self._age: dict[str, float] = {}
        self._at: dict[str, str] = {}
        self._places: defaultdict[str, dict[str, int]] = defaultdict(dict)
        """By engine: context tokens of the trajectories that have a place there."""
        self._running: set[str] = set()
        self._count = 0

    def key(self, turn: TurnView, now: float) -> float:
        """See `Policy.key`: the older trajectory first."""
        self._running.discard(turn.trajectory)
        if turn.trajectory not in self._age:
            self._count += 1
            self._age[turn.trajectory] = float(self._count)
        return self._age[turn.trajectory]

    def route(self, turn: TurnView, board: Board, now: float) -> Decision:
        """See `Policy.route`."""
        name, context = turn.trajectory, turn.context_tokens
        last = board.engines.get(self._at.get(name, ""))
        if last is not None and last.open:
            self._places[last.engine][name] = context
            if self._keeps(name, last):
                return self._sent(turn, last, "{engine} has it") if last.free else wait_for("last", last.engine)
        self._leave(name)
        free = eligible(turn, board)
        if not free:
            return wait(board)
        best = min(free, key=self._used)
        used = self._used(best)
        if used and used + context / best.kv_capacity > START_AT:
            return wait_for("room")
        return self._sent(turn, best, "{engine} has the most room")

    def forget(self, trajectory: str) -> None:
        self._leave(trajectory)
        self._age.pop(trajectory, None)

    def _keeps(self, name: str, engine: EngineView) -> bool:
        """Whether a trajectory keeps its place, for which others may lose theirs."""
        places = self._places[engine.engine]
        held = sum(tokens for other, tokens in places.items() if self._age[other] < self._age[name])
        return not held or held + places[name] <= PAUSE_AT * engine.kv_capacity

    def _used(self, engine: EngineView) -> float:
        """Share of its cache."""
        return sum(self._places[engine.engine].values()) / engine.kv_capacity

    def _sent(self, turn: TurnView, engine: EngineView, why: str) -> Decision:
        self._at[turn.trajectory] = engine.engine
        self._places[engine.engine][turn.trajectory] = turn.context_tokens
        self._running.add(turn.trajectory)
        return send(engine, why)

    def _leave(self, name: str) -> None:
        self._running.discard(name)
        self._places[self._at.pop(name, "")].pop(name, None)


class ThunderAgent(Fit):
    """The smallest lose their places first, while their tools run."""

    name = "thunder_agent"

    def key(self, turn: TurnView, now: float) -> float:
        """See `Policy.key`: the smallest context that has no place first, behind those that have one."""
        super().key(turn, now)
        return 0.0 if turn.trajectory in self._at else float(turn.context_tokens)

    def _keeps(self, name: str, engine: EngineView) -> bool:
        places, limit = self._places[engine.engine], PAUSE_AT * engine.kv_capacity
        over = sum(places.values()) - limit
        idle = [one for one in places if one not in self._running and one != name]
        for other in sorted(idle, key=places.__getitem__):
            if over <= 0:
                break
            over -= places[other]
            self._leave(other)
        return over <= 0 or len(places) == 1


class ProgramAge(Fit):
    """No new trajectory starts while caches are full; nobody loses a place."""

    name = "program_age"

    def _keeps(self, name: str, engine: EngineView) -> bool:
        return True

    def _used(self, engine: EngineView) -> float:
        """The share of the cache that it uses, as reported; before that its trajectories."""
        return max(engine.kv_use, super()._used(engine))


class KvRouter(Rule):
    """The engine where prefill and contexts in flight are fewest."""

    name = "kv_router"

    def __init__(self) -> None:
        self._cached: dict[str, dict[str, int]] = {}
        """By trajectory and engine: tokens of its last context there."""
        self._prompts: defaultdict[str, set[str]] = defaultdict(set)
        """By prompt: engines that have it."""

    def route(self, turn: TurnView, board: Board, now: float) -> Decision:
        """See `Policy.route`."""
        cached = self._cached.setdefault(turn.trajectory, {})

        def cost(engine: EngineView) -> int:
            has = turn.context_tokens if not turn.turns and engine.engine in self._prompts[turn.prompt_id] else 0
            return turn.context_tokens - cached.get(engine.engine, has) + engine.inflight_tokens

        best = min(eligible(turn, board), key=cost, default=None)
        if best is None:
            return wait(board)
        cached[best.engine] = turn.context_tokens
        self._prompts[turn.prompt_id].add(best.engine)
        return send(best, "{engine} has the least to prefill and in flight")

    def forget(self, trajectory: str) -> None:
        self._cached.pop(trajectory, None)
