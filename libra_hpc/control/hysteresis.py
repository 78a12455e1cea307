"""Hysteresis: what a move costs, what it must bring, and how many may be made.

* The cost of a direction is the median of its last `SWITCHES` = 3 measured moves, the configured prior before the
  first.
* A direction whose move made batches slower must bring `PENALTY` = 2 times as much from then on, doubled at each
  further failure, until the workload drifts and the old lesson no longer applies.
* Where nothing changes, a move is proposed first, and made when it is proposed again.
* No hour sees more than ``moves_per_hour`` node moves, however well each of them is justified: a workload that swings
  faster than that is not chased.
"""

from __future__ import annotations

from statistics import median
from typing import Literal, NamedTuple

from libra_hpc.config.rollout import PlannerSection
from libra_hpc.protocol.plan import NodeFact, PlanSnapshot

SWITCHES = 3
PENALTY = 2.0
HOUR = 3600.0
STAGES = ("train", "rollout")
ON_THE_WAY = {"to_train": "train", "to_rollout": "rollout"}

Direction = Literal["to_train", "to_rollout"]


class Proposal(NamedTuple):
    """A move that waits for a second look."""

    direction: Direction
    at: float


class Hysteresis:
    """Watches the nodes of every snapshot."""

    def __init__(self, settings: PlannerSection) -> None:
        self.proposal: Proposal | None = None
        """What a second look has to confirm, on steps after its time."""
        self._settings = settings
        self._failures: dict[Direction, int] = {"to_train": 0, "to_rollout": 0}
        self._stage: dict[int, str] = {}
        self._moved: list[float] = []

    def observe(self, nodes: tuple[NodeFact, ...], now: float) -> None:
        """Count the nodes that left their stage for the other since the last look."""
        for node in nodes:
            stage = ON_THE_WAY.get(node.role, node.role)
            if stage in STAGES:
                if self._stage.get(node.rank, stage) != stage:
                    self._moved.append(now)
                self._stage[node.rank] = stage
        self._moved = [at for at in self._moved if at > now - HOUR]

    @property
    def left(self) -> int:
        """Node moves that this hour still admits."""
        return max(0, self._settings.moves_per_hour - len(self._moved))

    def failed(self, direction: Direction) -> None:
        """A move made things worse."""
        self._failures[direction] += 1

    def forgive(self) -> None:
        """The workload changed."""
        self.proposal = None
        self._failures = {"to_train": 0, "to_rollout": 0}

    def passes(self, direction: Direction, settled: bool, now: float) -> bool:
        """Whether a move may be made now; one of a ``settled`` loop is kept as a proposal unless it was one already."""
        if settled and (self.proposal is None or self.proposal.direction != direction):
            self.proposal = Proposal(direction, now)
            return False
        self.proposal = None
        return True

    def cost(self, direction: Direction, snapshot: PlanSnapshot) -> float:
        """Seconds of one move; nodes that go together take as long as one."""
        seen = [s.seconds for s in snapshot.switches if s.direction == direction][-SWITCHES:]
        return median(seen) if seen else self._settings.switch_cost_s

    def times(self, direction: Direction) -> float:
        """By what factor the gain must exceed the cost."""
        return self._settings.margin * PENALTY ** self._failures[direction]
