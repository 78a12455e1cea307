"""Rules of admission that can be put on any policy: which trajectories may start at an engine now.

- A trajectory lives at the engine of its last turn, tool time included.  There its turns are always admitted.
- An engine does not admit a turn -> it is closed while the policy routes that turn.
- No open engine admits a first turn -> it waits for room, and no later one of the queue starts before it.
- No open engine admits a later turn -> the policy routes it among all.
- An engine without live trajectories must admit any turn, or turns would wait for ever.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from libra_hpc.policies.scheduling.board import Board, EngineView
from libra_hpc.policies.scheduling.protocol import Decision, Finished, Policy, TurnView
from libra_hpc.policies.scheduling.turn_migration import Rebalances, Running, TurnMigration


class Admission(Protocol):
    def observe(self, board: Board, now: float) -> None:
        """Read the engines' reports; called before each decision."""

    def ready(self, turn: TurnView) -> None:
        """A turn became ready: the context of its trajectory has grown."""

    def admits(self, turn: TurnView, engine: EngineView) -> bool:
        """Whether the turn may go to an open engine now."""

    def sent(self, turn: TurnView, engine: str) -> None:
        """The turn went to ``engine``; its trajectory lives there from now on."""

    def ended(self, trajectory: str, context_tokens: int) -> None:
        """A trajectory finished with so many tokens of context, or was aborted: 0."""


class Admitted:
    def __init__(self, policy: Policy, admission: Admission) -> None:
        self.name = policy.name
        self._policy, self._admission = policy, admission
        self._keys: dict[str, float] = {}

    def key(self, turn: TurnView, now: float) -> float:
        self._admission.ready(turn)
        key = self._keys[turn.trajectory] = self._policy.key(turn, now)
        return key

    def route(self, turn: TurnView, board: Board, now: float) -> Decision:
        """See `Policy.route`: among the engines that admit the turn."""
        admission = self._admission
        admission.observe(board, now)
        is_open = [view for view in board.engines.values() if view.open]
        closed = [view.engine for view in is_open if not admission.admits(turn, view)]
        if turn.engine:
            closed = closed if len(closed) < len(is_open) else []
        elif len(closed) == len(is_open) or self._keys[turn.trajectory] > board.room_key:
            return Decision(engine="", priority=0, level=0, template="wait: not admitted", numbers={}, wait="room")
        for name in closed:
            board.set_open(name, False)
        decision = self._policy.route(turn, board, now)
        for name in closed:
            board.set_open(name, True)
        if decision.engine:
            admission.sent(turn, decision.engine)
        return decision

    def rebalance(self, running: Iterable[Running], board: Board, now: float) -> list[TurnMigration]:
        policy = self._policy
        return list(policy.rebalance(running, board, now)) if isinstance(policy, Rebalances) else []

    def finished(self, record: Finished, now: float) -> None:
        self._ended(record.trajectory, record.context_tokens)
        self._policy.finished(record, now)

    def forget(self, trajectory: str) -> None:
        self._ended(trajectory, 0)
        self._policy.forget(trajectory)

    def _ended(self, trajectory: str, context_tokens: int) -> None:
        self._keys.pop(trajectory, None)
        self._admission.ended(trajectory, context_tokens)


class KvShare:
    """Constant share: the contexts of the trajectories that live at an engine fill at most ``share`` of its KV cache.

    They still grow after their admission, so a share near 1 lets them evict each other.
    """

    def __init__(self, share: float) -> None:
        self.share = share
        self._lives: dict[str, tuple[str, int]] = {}
        """By trajectory: its engine, and its context in tokens."""
        self._tokens: dict[str, int] = {}
        """By engine: sum of those contexts; engines without live trajectories are absent."""

    def observe(self, board: Board, now: float) -> None:
        """See `Admission.observe`."""

    def ready(self, turn: TurnView) -> None:
        if turn.trajectory in self._lives:
            self.sent(turn, self._lives[turn.trajectory][0])

    def admits(self, turn: TurnView, engine: EngineView) -> bool:
        name = engine.engine
        tokens = self._tokens.get(name, 0)
        if not tokens or self._lives.get(turn.trajectory, ("", 0))[0] == name:
            return True
        return tokens + turn.context_tokens <= self.share * engine.kv_capacity

    def sent(self, turn: TurnView, engine: str) -> None:
        self._remove(turn.trajectory)
        tokens = turn.context_tokens
        self._lives[turn.trajectory] = engine, tokens
        self._tokens[engine] = self._tokens.get(engine, 0) + tokens

    def ended(self, trajectory: str, context_tokens: int) -> None:
        self._remove(trajectory)

    def _remove(self, trajectory: str) -> None:
        engine, tokens = self._lives.pop(trajectory, ("", 0))
        if engine:
            left = self._tokens[engine] = self._tokens[engine] - tokens
            if not left:
                del self._tokens[engine]


class LiveCap:
    """At most so many trajectories live at one engine."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._lives: dict[str, str] = {}
        """By trajectory: its engine."""
        self._count: dict[str, int] = {}

    def observe(self, board: Board, now: float) -> None:
        """See `Admission.observe`."""

    def ready(self, turn: TurnView) -> None:
        """See `Admission.ready`."""

    def admits(self, turn: TurnView, engine: EngineView) -> bool:
        name = engine.engine
        return self._lives.get(turn.trajectory) == name or self._count.get(name, 0) < self.most

    def sent(self, turn: TurnView, engine: str) -> None:
        self.ended(turn.trajectory, 0)
        self._lives[turn.trajectory] = engine
        self._count[engine] = self._count.get(engine, 0) + 1

    def ended(self, trajectory: str, context_tokens: int) -> None:
        engine = self._lives.pop(trajectory, "")
        if engine:
            self._count[engine] -= 1
