"""Admission: which waiting trajectories may start or go on at an engine now, whatever the policy.

The dispatcher asks before it offers a turn to the policy, live and in the simulator.

- A trajectory lives at the engine of its last turn, tool time included.  There its turns are always admitted.
- An engine does not admit a turn -> it is closed while the policy routes that turn.
- No open engine admits it -> it is set aside.  Of first turns the one with the lowest `Policy.key` comes back first.
- An engine without live trajectories must admit any turn, or turns would wait for ever.
"""

from __future__ import annotations

from typing import Protocol

from .board import Board, EngineView
from .protocol import TurnView


class Admission(Protocol):
    """A rule of admission; the dispatcher calls it."""

    def observe(self, board: Board, now: float) -> None:
        """Read the engines' reports; called before each pass over the waiting turns."""

    def ready(self, turn: TurnView) -> None:
        """A turn became ready: the context of its trajectory has grown."""

    def admits(self, turn: TurnView, engine: EngineView) -> bool:
        """Whether the turn may go to an open engine now."""

    def sent(self, turn: TurnView, engine: str) -> None:
        """The turn went to ``engine``; its trajectory lives there from now on."""

    def ended(self, trajectory: str) -> None:
        """A trajectory finished or was aborted."""


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
        """See `Admission.ready`."""
        if turn.trajectory in self._lives:
            self.sent(turn, self._lives[turn.trajectory][0])

    def admits(self, turn: TurnView, engine: EngineView) -> bool:
        """See `Admission.admits`."""
        name = engine.engine
        tokens = self._tokens.get(name, 0)
        if not tokens or self._lives.get(turn.trajectory, ("", 0))[0] == name:
            return True
        return tokens + turn.context_tokens <= self.share * engine.kv_capacity

    def sent(self, turn: TurnView, engine: str) -> None:
        """See `Admission.sent`."""
        self.ended(turn.trajectory)
        self._lives[turn.trajectory] = engine, turn.context_tokens
        self._tokens[engine] = self._tokens.get(engine, 0) + turn.context_tokens

    def ended(self, trajectory: str) -> None:
        """See `Admission.ended`."""
        engine, tokens = self._lives.pop(trajectory, ("", 0))
        if engine:
            left = self._tokens[engine] = self._tokens[engine] - tokens
            if not left:
                del self._tokens[engine]
