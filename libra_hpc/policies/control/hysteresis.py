"""Hysteresis: what a move costs, how it is confirmed, and how many moves an hour allows.

- A direction was measured -> its cost is the median of its last `SWITCHES` moves; before, ``switch_cost_s``.
- A settled loop proposes a move -> it is made only when proposed again.
- ``moves_per_hour`` nodes moved within an hour -> no more moves.
"""

from __future__ import annotations

from statistics import median
from typing import Literal, NamedTuple

from libra_hpc.config.rollout import PlannerSection
from libra_hpc.protocol.plan import NodeFact, PlanSnapshot

SWITCHES = 3
"""Newest measured moves of a direction: the median of three ignores one outlier."""
HOUR = 3600.0
"""Seconds."""
STAGES = ("train", "rollout")
DESTINATION = {"to_train": "train", "to_rollout": "rollout"}
"""Stage that a moving node goes to."""

Direction = Literal["to_train", "to_rollout"]


class Proposal(NamedTuple):
    """A move that waits for confirmation."""

    direction: Direction
    at: float


class Hysteresis:
    """Limits on moves; `observe` takes the nodes of every snapshot."""

    def __init__(self, settings: PlannerSection) -> None:
        self.proposal: Proposal | None = None
        """The move to confirm, by steps after its time."""
        self._settings = settings
        self._stage: dict[int, str] = {}
        self._moved: list[float] = []

    def observe(self, nodes: tuple[NodeFact, ...], now: float) -> None:
        """Count the nodes that left their stage for the other since the last call."""
        for node in nodes:
            stage = DESTINATION.get(node.role, node.role)
            if stage in STAGES:
                if self._stage.get(node.rank, stage) != stage:
                    self._moved.append(now)
                self._stage[node.rank] = stage
        self._moved = [at for at in self._moved if at > now - HOUR]

    @property
    def moves_left(self) -> int:
        """Node moves that this hour still allows."""
        return max(0, self._settings.moves_per_hour - len(self._moved))

    def reset(self) -> None:
        """The workload changed: drop the proposal."""
        self.proposal = None

    def allows(self, direction: Direction, settled: bool, now: float) -> bool:
        """Whether to move now; the move of a ``settled`` loop first becomes a proposal."""
        if settled and (self.proposal is None or self.proposal.direction != direction):
            self.proposal = Proposal(direction, now)
            return False
        self.proposal = None
        return True

    def switch_cost(self, direction: Direction, snapshot: PlanSnapshot) -> float:
        """Seconds of one move; nodes that move together take as long as one."""
        seen = [s.seconds for s in snapshot.switches if s.direction == direction][-SWITCHES:]
        return median(seen) if seen else self._settings.switch_cost_s
