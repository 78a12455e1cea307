"""Admission: which waiting trajectories may start or go on at an engine now, whatever the policy.

The dispatcher asks before it offers a turn to the policy, live and in the simulator.

- A trajectory lives at the engine of its last turn, tool time included.  There its turns are always admitted.
- An engine does not admit a turn -> it is closed while the policy routes that turn.
- No open engine admits it -> it is set aside.  Of first turns the one with the lowest `Policy.key` comes back first.
- An engine without live trajectories must admit any turn, or turns would wait for ever.
"""

from __future__ import annotations

from typing import Final, Protocol

from .board import Board, EngineView
from .protocol import TurnView

FIRST_CONTEXT: Final = 0.25
"""Share of the longest context.  Half is as good where KV is short, and costs 2 % where it suffices."""
FIRST_WEIGHT: Final = 16
"""Finished trajectories that the first guess is worth: those that finish first are shorter than the mean."""


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

    def ended(self, trajectory: str, context_tokens: int) -> None:
        """A trajectory finished with so many tokens of context, or was aborted: 0."""


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
        return tokens + self.counted(turn) <= self.share * engine.kv_capacity

    def counted(self, turn: TurnView) -> int:
        """Tokens that the trajectory of a turn counts."""
        return turn.context_tokens

    def sent(self, turn: TurnView, engine: str) -> None:
        """See `Admission.sent`."""
        self._remove(turn.trajectory)
        tokens = self.counted(turn)
        self._lives[turn.trajectory] = engine, tokens
        self._tokens[engine] = self._tokens.get(engine, 0) + tokens

    def ended(self, trajectory: str, context_tokens: int) -> None:
        """See `Admission.ended`."""
        self._remove(trajectory)

    def _remove(self, trajectory: str) -> None:
        engine, tokens = self._lives.pop(trajectory, ("", 0))
        if engine:
            left = self._tokens[engine] = self._tokens[engine] - tokens
            if not left:
                del self._tokens[engine]


class KvForecast(KvShare):
    """All live trajectories fit in the KV cache at the mean length: each counts its context, at least the mean of
    finished trajectories.

    Before the first one ends, the mean is a share of the context at which a run ends trajectories.
    """

    def __init__(self, share: float = 1.0) -> None:
        super().__init__(share)
        self._finished = self._context = 0

    def counted(self, turn: TurnView) -> int:
        """See `KvShare.counted`."""
        first = FIRST_WEIGHT * FIRST_CONTEXT * turn.max_context
        return max(turn.context_tokens, int((first + self._context) / (FIRST_WEIGHT + self._finished)))

    def ended(self, trajectory: str, context_tokens: int) -> None:
        """See `Admission.ended`: the mean learns."""
        self._remove(trajectory)
        if context_tokens:
            self._finished += 1
            self._context += context_tokens
