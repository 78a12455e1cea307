"""Seconds of a batch at another state of the nodes: measured here, times played there, over played here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import NamedTuple

from libra_hpc.errors import OperationError, UserError
from libra_hpc.protocol.engine_state import StepCosts
from libra_hpc.protocol.plan import PlanDecision, PlanSnapshot
from libra_hpc.protocol.trace import TrajectoryRecord

BOUND = 2.0
"""Most that a measured batch may differ from the played one, as a ratio."""
BOTH = "both"
"""`NodeFact.role` of a node in time-sharing."""


class PlayWork(NamedTuple):
    """What is played: the coming trajectories, and what the run has measured."""

    records: list[TrajectoryRecord]
    groups: int
    """Groups of one batch, with those that others replace."""
    eta: int
    costs: tuple[StepCosts, ...]
    train_seconds: Callable[[int, int], float]
    """(tokens, training nodes) -> seconds."""

    @property
    def share(self) -> float:
        """One batch's share of the records."""
        return self.groups / len({record.prompt_id for record in self.records})


class State(NamedTuple):
    """How many nodes do what."""

    train: int
    rollout: int
    lent: int = 0
    """Own nodes that guests stand for."""
    in_turn: bool = False
    """Whether nodes serve both stages of a step; they are in both numbers."""


class Seconds(NamedTuple):
    """Seconds of one batch."""

    train: float
    rollout: float
    batch: float


Play = Callable[[PlayWork, State], tuple[float, float]]
"""(work, state) -> seconds of a batch without switches, and those out of them in which it is rolled out. Raises
`UserError` or `OperationError` where it cannot be played."""


class Plays:
    """Plays of one work; each state is played once.

    ``switches_s``: a pair of switches, which a batch in turn has.
    """

    def __init__(self, play: Play, work: PlayWork, switches_s: float) -> None:
        self.work, self.switches_s = work, switches_s
        self._play = play
        self._tokens = round(sum(record.context for record in work.records) * work.share)
        self._known: dict[State, Seconds] = {}
        self._ratios: dict[bool, float] = {}
        self._why = ""

    def measured(self, here: State, batch_s: float, ratios: dict[bool, float]) -> str:
        """A batch takes so long here; ``ratios`` of both ways are kept. Return why nothing can be played, or ""."""
        played = self._played(here).batch
        if played < inf:
            ratios[here.in_turn] = min(max(batch_s / played, 1.0 / BOUND), BOUND)
            # A way that was never seen is not expected to do better than its play.
            ratios.setdefault(not here.in_turn, max(1.0, ratios[here.in_turn]))
            self._ratios = ratios
        return self._why

    def at(self, state: State) -> Seconds:
        ratio = self._ratios[state.in_turn]
        return Seconds(*(ratio * value for value in self._played(state)))

    def numbers(self, here: State) -> dict[str, float]:
        """What a decision says of the present state."""
        train_s, rollout_s, batch_s = self.at(here)
        seconds = {"train_s": train_s, "rollout_s": rollout_s, "batch_s": batch_s}
        return {"train_nodes": float(here.train), "rollout_nodes": float(here.rollout), **seconds}

    @property
    def ratio(self) -> float:
        """Measured over played seconds where nodes have one stage."""
        return self._ratios[False]

    def _played(self, state: State) -> Seconds:
        if state not in self._known:
            try:
                batch, rolls = self._play(self.work, state)
            except (UserError, OperationError) as error:
                self._why, batch, rolls = str(error), inf, inf
            train = self.work.train_seconds(self._tokens, state.train)
            self._known[state] = Seconds(train, rolls, batch + self.switches_s * state.in_turn)
        return self._known[state]


def present(snapshot: PlanSnapshot) -> State:
    """What the nodes do now."""
    roles = [node.role for node in snapshot.nodes]
    both = roles.count(BOTH)
    return State(roles.count("train") + both, roles.count("rollout") + both, round(snapshot.lent), both > 0)


def downhill(plays: Plays, states: Sequence[State], start: int) -> dict[State, Seconds]:
    """Seconds from ``states[start]`` on, both ways as long as batches become shorter."""
    found = {states[start]: plays.at(states[start])}
    for way in (1, -1):
        last, at = found[states[start]].batch, start + way
        while 0 <= at < len(states):
            found[states[at]] = seconds = plays.at(states[at])
            if seconds.batch >= last:
                break
            last, at = seconds.batch, at + way
    return found


def hold(why: str, numbers: dict[str, float] | None = None) -> PlanDecision:
    return PlanDecision("hold", -1, f"hold: {why}", numbers or {})
