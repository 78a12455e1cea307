"""Seconds of a batch at another state of the nodes: measured here, times played there, over played here.

All states play the same trajectories, as far as a `Race` needs to tell them apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import NamedTuple

from libra_hpc.errors import OperationError, UserError
from libra_hpc.protocol.engine_state import StepCosts
from libra_hpc.protocol.plan import PlanDecision, PlanSnapshot
from libra_hpc.protocol.trace import TrajectoryRecord

from .race import Contender, Race, downhill

BOUND = 2.0
"""Most that a measured batch may differ from the played one, as a ratio."""
BOTH = "both"
"""`NodeFact.role` of a node in time-sharing."""


class PlayWork(NamedTuple):
    """What is played in every round: the coming trajectories; and what the run has measured."""

    records: list[TrajectoryRecord]
    groups: int
    """Groups of one batch, with those that others replace."""
    eta: int
    costs: tuple[StepCosts, ...]
    train_seconds: Callable[[int, int], float]
    """(tokens, training nodes) -> seconds."""
    switches_s: float
    """A pair of switches, which a batch in turn has."""

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


Play = Callable[[PlayWork, State], Contender]
"""It raises `UserError` or `OperationError` where it cannot be played, its rounds too."""


class Plays:
    """Plays of one work, in at most ``rounds``; each state is played once."""

    def __init__(self, play: Play, work: PlayWork, rounds: int) -> None:
        self.work = work
        self._play = play
        self._tokens = round(sum(record.context for record in work.records) * work.share)
        self._races = {in_turn: Race[State, Contender](rounds) for in_turn in (False, True)}
        self._shares: dict[State, float] = {}
        """`Contender.rollout_share`; infinite: it cannot be played."""
        self._here, self._batch_s, self._ratios = State(0, 0), 0.0, dict[bool, float]()
        self._why = ""

    def measured(self, here: State, batch_s: float, ratios: dict[bool, float]) -> str:
        """A batch takes so long here; ``ratios`` of both ways are kept. Return why nothing can be played, or ""."""
        self._here, self._batch_s, self._ratios = here, batch_s, ratios
        if self._played(here).batch < inf:
            # A way that was never seen is not expected to do better than its play.
            ratios.setdefault(not here.in_turn, max(1.0, self.ratio(here.in_turn)))
        return self._why

    def at(self, state: State) -> Seconds:
        ratio = self.ratio(state.in_turn)
        return Seconds(*(ratio * value for value in self._played(state)))

    def ratio(self, in_turn: bool) -> float:
        """Measured over played seconds, in turn or where nodes have one stage."""
        if in_turn == self._here.in_turn:
            ratio = self._batch_s / self._played(self._here).batch
            self._ratios[in_turn] = min(max(ratio, 1.0 / BOUND), BOUND)
        return self._ratios[in_turn]

    def numbers(self, here: State) -> dict[str, float]:
        """What a decision says of the present state."""
        train_s, rollout_s, batch_s = self.at(here)
        seconds = {"train_s": train_s, "rollout_s": rollout_s, "batch_s": batch_s}
        return {"train_nodes": float(here.train), "rollout_nodes": float(here.rollout), **seconds}

    def downhill(self, states: Sequence[State], start: int) -> dict[State, Seconds]:
        """Seconds of those played, from ``states[start]`` on as long as batches become shorter; the best one is first.

        That is ``states[start]`` unless it is clearly slower.
        """
        downhill(len(states), start, lambda at: self.at(states[at]).batch)
        race = self._races[states[start].in_turn]
        best = race.decide() if race.left else states[start]
        chosen = states[start] if states[start] in race.left else best
        return {state: self.at(state) for state in (chosen, *states) if state in self._shares}

    def _played(self, state: State) -> Seconds:
        race = self._races[state.in_turn]
        if state not in self._shares:
            self._shares[state] = inf
            try:
                play = self._play(self.work, state)
                race.enter(state, play)
                self._shares[state] = play.rollout_share
            except (UserError, OperationError) as error:
                self._why = str(error)
        share = self._shares[state]
        batch = inf if share == inf else race.seconds(state)
        return Seconds(self.work.train_seconds(self._tokens, state.train), share * batch, batch)


def present(snapshot: PlanSnapshot) -> State:
    """What the nodes do now."""
    roles = [node.role for node in snapshot.nodes]
    both = roles.count(BOTH)
    return State(roles.count("train") + both, roles.count("rollout") + both, round(snapshot.lent), both > 0)


def hold(why: str, numbers: dict[str, float] | None = None) -> PlanDecision:
    return PlanDecision("hold", -1, f"hold: {why}", numbers or {})
