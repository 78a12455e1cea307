"""Limits of admission that can be put on any policy: which trajectories may start at an engine now.

- A trajectory lives at the engine of its last turn, tool time included. There its turns are always admitted.
- An engine does not admit a turn -> it is closed while the policy routes that turn.
- No open engine admits a first turn -> it waits for room, and no later one of the queue starts before it.
- No open engine admits a later turn -> the policy routes it among all.
- An engine without live trajectories admits any turn, or turns would wait for ever.
"""

from __future__ import annotations

from collections import Counter

from libra_hpc.policies.scheduling.board import Board, EngineView
from libra_hpc.policies.scheduling.protocol import Decision, Finished, Policy, TurnView


class Admitted:
    """At most ``most`` trajectories live at an engine, or with contexts that fill at most ``share`` of its KV cache.

    Contexts still grow after their admission, so a share near 1 lets them evict each other.
    """

    def __init__(self, policy: Policy, *, most: int = 0, share: float = 0.0) -> None:
        self.name = policy.name
        self._policy, self._most, self._share = policy, most, share
        self._keys: dict[str, float] = {}
        self._lives: dict[str, tuple[str, int]] = {}
        """By trajectory: its engine, and what it takes of the limit there."""
        self._used: Counter[str] = Counter()

    def key(self, turn: TurnView, now: float) -> float:
        if turn.trajectory in self._lives:
            # Its context has grown.
            self._put(turn, self._lives[turn.trajectory][0])
        key = self._keys[turn.trajectory] = self._policy.key(turn, now)
        return key

    def route(self, turn: TurnView, board: Board, now: float) -> Decision:
        """See `Policy.route`: among the engines that admit the turn."""
        is_open = [view for view in board.engines.values() if view.open]
        closed = [view.engine for view in is_open if not self._admits(turn, view)]
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
            self._put(turn, decision.engine)
        return decision

    def finished(self, record: Finished, now: float) -> None:
        self._ended(record.trajectory)
        self._policy.finished(record, now)

    def forget(self, trajectory: str) -> None:
        self._ended(trajectory)
        self._policy.forget(trajectory)

    def _admits(self, turn: TurnView, engine: EngineView) -> bool:
        used = self._used[engine.engine]
        if not used or self._lives.get(turn.trajectory, ("", 0))[0] == engine.engine:
            return True
        return used + self._size(turn) <= (self._most or self._share * engine.kv_capacity)

    def _size(self, turn: TurnView) -> int:
        return 1 if self._most else turn.context_tokens

    def _put(self, turn: TurnView, engine: str) -> None:
        self._remove(turn.trajectory)
        self._lives[turn.trajectory] = engine, self._size(turn)
        self._used[engine] += self._size(turn)

    def _ended(self, trajectory: str) -> None:
        self._keys.pop(trajectory, None)
        self._remove(trajectory)

    def _remove(self, trajectory: str) -> None:
        engine, size = self._lives.pop(trajectory, ("", 0))
        self._used[engine] -= size
