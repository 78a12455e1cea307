"""C-MLFQ: a multi-level feedback queue whose feedback is causal: what a trajectory has become, not how long it ran.

A level is one TP class of the engines present.  Step costs: `costs`.  Where the contexts exceed the KV caches,
`residency` decides which trajectories keep theirs and which wait.

- A first turn is ready -> the engine where it adds least to ``sum over engines of load ** 4``, a stand-in for the
  makespan.  The load: the residents' tokens, and `GROWTH` for each, at what one costs in every step of a full cache.
- A later turn -> its last engine, which has the context cached, unless that costs `MOVE_MARGIN` times more.
- Its last engine is full -> it waits there, unless that costs `MOVE_MARGIN` times more than an engine with a slot.
- A resident was parked, or its engine is gone -> as a first turn.
- Order of the queue: ready time minus a credit of 0 to `AGEING_S`.  Later turns get more than half, the longest context
  most.  First turns get less, the longest prompt least.
"""

from __future__ import annotations

from math import inf
from typing import Final

from .board import Board, EngineView
from .protocol import Decision, Finished, TurnView, Wait
from .residency import Claim, EngineCache, release

MOVE_MARGIN: Final = 3.0
"""A ratio of costs: engines of the same pace must differ by 1.4 in their loads."""
GROWTH: Final = 2_048.0
"""Tokens that each trajectory counts beyond its context.  0: one engine gets most siblings of a short prompt, and a
batch of math takes 1.17 times as long, a quarter: 1.10 times; four times: long prompts are computed more often."""
AGEING_S: Final = 300.0
"""Seconds: no turn is overtaken by one that became ready this much later, so none starves."""
HALF_TOKENS: Final = 8_192.0
"""Context tokens that get half of the credit.  At four times as many, a batch beside a slow engine is 4 % longer."""
PRIORITIES_PER_S: Final = 10
"""Engine priorities are integers: one is 0.1 s of virtual time."""

STARTS: Final = "start: {engine} holds {held:.0f} of {capacity:.0f} tokens, and adds least to the late finish"
STAYS: Final = "stay: {engine} has the context cached; it holds {held:.0f} of {capacity:.0f} tokens"
MOVES: Final = (
    "move: {engine} adds {ratio:.1f} times less to the late finish than {last}, though the context is prefilled again"
)
WAITS_FOR_LAST: Final = "wait: {engine} has the context cached and no free slot"
NO_ROOM: Final = "wait: the KV caches are full with contexts of others"
WAITS: Final = "wait: no engine has a free slot"


class _Engine:
    """An engine of the board, and what it holds."""

    def __init__(self, view: EngineView) -> None:
        self.view = view
        self.cache = EngineCache(float(max(1, view.kv_capacity)))
        self.token_s = 0.0
        """Seconds that a context token costs in a step of a full cache."""

    def cost(self, more: int, new: int = 0) -> float:
        """What a token adds to the late finish, the sum of fourth powers, with ``more`` tokens of ``new`` residents."""
        load = self.token_s * (self.cache.held + more + GROWTH * (self.cache.residents + new))
        return self.token_s * load * load * load


class CausalMlfq:
    """The policy `cmlfq`."""

    name = "cmlfq"

    def __init__(self) -> None:
        self._generation = -1
        """Generation of the board whose engines and costs were read."""
        self._engines: dict[str, _Engine] = {}
        self._claims: dict[str, Claim] = {}
        """Open trajectories by name."""

    def key(self, turn: TurnView, now: float) -> float:
        """See `Policy.key`: the time it became ready, minus its credit."""
        claim = self._claims.get(turn.trajectory)
        if claim is None:
            claim = Claim(turn.prompt_id, 0 if turn.turns else turn.context_tokens)
            self._claims[turn.trajectory] = claim
        share = turn.context_tokens / (turn.context_tokens + HALF_TOKENS)
        credit = 0.5 * AGEING_S * (1.0 + share if turn.turns else 1.0 - share)
        claim.key, claim.running = turn.ready_at - credit, False
        return claim.key

    def route(self, turn: TurnView, board: Board, now: float) -> Decision:
        """See `Policy.route`: the last engine, or the one where the context adds least to the late finish."""
        claim = self._claims.get(turn.trajectory)
        if claim is None:
            self.key(turn, now)
            claim = self._claims[turn.trajectory]
        self._sync(board)
        last, context = self._resident_at(claim, turn), turn.context_tokens
        if last is None and claim.key > board.room_key:
            return self._wait(claim, NO_ROOM, "room")
        best = self._cheapest(claim, context, last)
        if last is not None:
            ratio = last.cost(0) / best.cost(context, 1) if best is not None else 0.0
            if best is None or ratio < MOVE_MARGIN:
                if last.view.free:
                    return self._send(claim, last, context, STAYS)
                return self._wait(claim, WAITS_FOR_LAST, "last", last.view.engine)
            return self._send(claim, best, context, MOVES, last=last.view.engine, ratio=ratio)
        if best is not None:
            return self._send(claim, best, context, STARTS)
        if any(engine.view.free and not engine.cache.has_room(claim, context) for engine in self._engines.values()):
            return self._wait(claim, NO_ROOM, "room")
        return self._wait(claim, WAITS, "slot")

    def finished(self, record: Finished, now: float) -> None:
        """See `Policy.finished`."""
        self.forget(record.trajectory)

    def forget(self, trajectory: str) -> None:
        """See `Policy.forget`."""
        claim = self._claims.pop(trajectory, None)
        if claim is not None:
            release(claim)

    def _sync(self, board: Board) -> None:
        """Read the engines and step costs of the board, if they have changed."""
        if board.generation == self._generation:
            return
        self._generation = board.generation
        before, self._engines = self._engines, {}
        for name, view in board.engines.items():
            engine = before.get(name)
            if engine is None or engine.view is not view:
                engine = _Engine(view)
            engine.token_s = view.base_s / engine.cache.capacity + view.slope_s
            self._engines[name] = engine

    def _resident_at(self, claim: Claim, turn: TurnView) -> _Engine | None:
        """The last engine, if the trajectory is resident there and stays so with its context, which has grown."""
        cache, last = claim.cache, self._engines.get(turn.engine)
        if cache is None:
            return None
        context = turn.context_tokens
        if last is not None and last.cache is cache and last.view.open and self._able(last, context):
            cache.hold(claim, context)
            if cache.fits(claim):
                return last
        release(claim)
        return None

    def _cheapest(self, claim: Claim, context: int, last: _Engine | None) -> _Engine | None:
        """The engine with a free slot and room where the context costs least, but for the last one."""
        best: _Engine | None = None
        least = inf
        for engine in self._engines.values():
            more = engine.cache.added(claim, context)
            cost = (more + GROWTH) * engine.cost(more, 1)
            if cost >= least or engine is last or not engine.view.free:
                continue
            if engine.cache.has_room(claim, context) and self._able(engine, context):
                best, least = engine, cost
        return best

    def _able(self, engine: _Engine, context: int) -> bool:
        """Whether an engine can hold the context, or none can: then it must refuse the turn."""
        return engine.cache.capacity >= context or all(one.cache.capacity < context for one in self._engines.values())

    @staticmethod
    def _send(
        claim: Claim, engine: _Engine, context: int, template: str, last: str = "", ratio: float = 0.0
    ) -> Decision:
        view, cache = engine.view, engine.cache
        cache.hold(claim, context)
        claim.running = True
        numbers: dict[str, float | str] = {"engine": view.engine, "held": cache.held, "capacity": cache.capacity}
        if last:
            numbers |= {"last": last, "ratio": ratio}
        priority = int(claim.key * PRIORITIES_PER_S)
        return Decision(engine=view.engine, priority=priority, level=view.level, template=template, numbers=numbers)

    @staticmethod
    def _wait(claim: Claim, template: str, wait: Wait, engine: str = "") -> Decision:
        priority, numbers = int(claim.key * PRIORITIES_PER_S), {"engine": engine}
        return Decision(engine="", priority=priority, level=0, template=template, numbers=numbers, wait=wait)
