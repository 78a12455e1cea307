"""A cap on open trajectories over all engines, after prime-rl's ``orchestrator/concurrency.py``; for any policy.

    cap = over-commit * KV tokens of all engines / expected cost of a trajectory

- Cost: a moving average of the contexts of finished trajectories; before the first one, ``first_cost``.
- A sequence was preempted since the last poll -> cap = 0.75 * open trajectories, and no further cut until they have
  fallen below it; preempted again after that -> 0.5.  The over-commit becomes what that cap implies.
- A step without preemptions and queues inside engines, and 90 % of the cap in use -> over-commit * ``growth``.

prime-rl counts a step per trained batch; here one per ``step`` finished trajectories, so that it also adapts within a
batch.  The reports of an engine that has just applied weights are no overload.
"""

from __future__ import annotations

from libra_hpc.policies.scheduling.board import Board, EngineView
from libra_hpc.policies.scheduling.protocol import TurnView

AVERAGE = 0.1
"""Weight of a new trajectory in the average."""
CUT, HARDER_CUT = 0.75, 0.5
IN_USE = 0.9
LEAST, MOST = 0.25, 16.0
"""Bounds of the over-commit."""
POLL_S = 5.0


class EpisodeCap:
    """An `Admission`; ``floor``: trajectories that are always admitted."""

    def __init__(self, first_cost: float, growth: float = 1.02, step: int = 64, floor: int = 8) -> None:
        self._cost, self._growth, self._step, self._floor = first_cost, growth, step, floor
        self._known = False
        self._commit = 1.0
        self.cap = floor
        self._open: set[str] = set()
        self._capacity = 0
        self._polled_at = -POLL_S
        self._seen: dict[str, tuple[int, int, int]] = {}
        """By engine: weight version, preemptions and waiting requests at the last poll."""
        self._finished = 0
        self._clear, self._draining, self._cut = True, False, CUT

    def observe(self, board: Board, now: float) -> None:
        if now - self._polled_at < POLL_S:
            return
        self._polled_at = now
        self._capacity = sum(view.kv_capacity for view in board.engines.values())
        # Of every engine: each remembers what it saw.
        overloaded = {view.engine for view in board.engines.values() if self._overloaded(view)}
        if self._draining and len(self._open) <= self.cap:
            self._draining = False
        if overloaded and not self._draining:
            self.cap = max(self._floor, int(self._cut * len(self._open)))
            self._commit = max(LEAST, self.cap * self._cost / max(1, self._capacity))
            self._draining, self._cut = True, HARDER_CUT
        elif not self._draining:
            self._set_cap()

    def ready(self, turn: TurnView) -> None:
        """See `Admission.ready`."""

    def admits(self, turn: TurnView, engine: EngineView) -> bool:
        """See `Admission.admits`: open trajectories may go anywhere."""
        return turn.trajectory in self._open or len(self._open) < self.cap

    def sent(self, turn: TurnView, engine: str) -> None:
        self._open.add(turn.trajectory)

    def ended(self, trajectory: str, context_tokens: int) -> None:
        used = len(self._open) >= IN_USE * self.cap
        self._open.discard(trajectory)
        if not context_tokens:
            return
        weight = AVERAGE if self._known else 1.0
        self._cost, self._known = (1.0 - weight) * self._cost + weight * context_tokens, True
        self._finished += 1
        if self._finished % self._step == 0:
            if self._clear and used:
                self._commit = min(MOST, self._commit * self._growth)
            if self._clear:
                self._cut = CUT
            self._clear = True
            self._set_cap()

    def _set_cap(self) -> None:
        self.cap = max(self._floor, int(self._commit * self._capacity / self._cost))

    def _overloaded(self, view: EngineView) -> bool:
        """Whether a sequence was preempted since the last poll; requests that still wait end a clear step."""
        version, preemptions, waiting = self._seen.get(view.engine, (-1, 0, 0))
        self._seen[view.engine] = view.version, view.preemptions, view.waiting
        hard = version == view.version and view.preemptions > preemptions
        if hard or (waiting and view.waiting):
            self._clear = False
        return hard
