"""The planner of a live run: it plays the coming work as the nodes are, and as they could be.

- Training seconds of a token are measured here; n nodes are ``(here / n) ** SCALING`` of that.
- Seconds elsewhere are the measured ones here, times those played there, over those played here (`Plays`).
- Nodes that may serve both stages in turn -> `way_choice`.
- Hybrid nodes -> `move_choice`: their best split, downhill from this one both ways.
- Nothing to move, and other work than all layouts were searched for -> `layout_choice`.
- Nothing to move, and the run may queue nodes for itself, or borrow servers -> `with_borrowed`.
- No step has ended, or the work is the same as before -> the last hold stays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import hypot, inf
from statistics import median
from typing import NamedTuple

from msgspec.structs import replace

from libra_hpc.config.rollout import PlannerSection
from libra_hpc.errors import OperationError, UserError
from libra_hpc.protocol.plan import PlanDecision, PlanSnapshot, TrajectoryFact

from .borrow_choice import with_borrowed
from .coming_work import BATCHES, coming_work, means, records
from .layout_choice import OtherLayout, layout_choice
from .move_choice import move_choice, switch_cost
from .plays import Play, Plays, PlayWork, State, hold, present
from .way_choice import way_choice

STEPS = 8
"""Newest steps at this split whose training is measured. Older ones are of another policy."""
LEAST_STEPS = 2
"""Fewest of them."""
ELSEWHERE = 4
"""Fewest steps with another number of nodes whose median replaces scaling: the first one has the regrouping in it."""
SCALING = 0.92
"""Twice the nodes train 2 ** 0.92 = 1.89 times as fast: data-parallel training with its fixed parts."""
ROUNDS = 4
"""Most batches of a play: the coming work is not known better."""
CHANGED = 0.05
"""Relative change of the mean lengths after which the same split is played once more before ``period_s`` has passed."""
OTHER_WORK = 0.25
"""The same after which all layouts are searched once more, and what time-sharing was worth is not known any more. Half:
the noise of small batches starts searches; double: the layout for half as long trajectories stays."""
CLEARLY = 3.0
"""Standard errors of the same. Half: work of few prompts that stays changes every hour; double: twice the length is not
seen there."""

Layouts = Callable[[PlayWork, int, float], Sequence[OtherLayout]]
"""(work, training nodes, their seconds of a batch) -> layouts of all nodes. Raises `UserError` where nothing
fits, `OperationError` where it cannot be played."""


class _Asked(NamedTuple):
    """A work that was played."""

    state: State
    generated: float
    context: float
    error: float
    """Relative standard error of what is generated."""
    at: float
    steps_left: int
    offers: frozenset[str]
    """Servers that would lend."""

    def differs(self, other: _Asked, most: float) -> bool:
        """Whether mean lengths differ by more than this share of the other's."""
        pairs = (self.generated, other.generated), (self.context, other.context)
        return any(abs(new - old) > most * old for new, old in pairs)

    def is_other_work(self, other: _Asked) -> bool:
        """Whether it differs by much, and by more than chance."""
        return self.differs(other, max(OTHER_WORK, CLEARLY * hypot(self.error, other.error)))


class Player:
    """Decides from snapshots; keeps what was played last.

    ``repartition_after``: no other layout is searched before, and then for other work alone.
    """

    def __init__(
        self, settings: PlannerSection, play: Play, layouts: Layouts | None = None, repartition_after: float = -inf
    ) -> None:
        self._settings, self._play, self._layouts = settings, play, layouts
        self._repartition_after = repartition_after
        self._measured: dict[int, float] = {}
        """Training seconds of a token by nodes, until they are measured again."""
        self._ratios: dict[bool, float] = {}
        """Measured over played seconds of a batch, in turn and not."""
        self._seen: dict[bool, _Asked] = {}
        """The work with which they were measured."""
        self._asked: _Asked | None = None
        self._searched: _Asked | None = None
        """The work that all layouts were searched for last."""
        self._proposed: set[str] = set()
        """Layouts, in words."""
        self._way: tuple[bool, float] | None = None
        """Whether nodes serve in turn, and since when."""
        self._held = hold("nothing has been played yet")

    def decide(self, snapshot: PlanSnapshot, now: float) -> PlanDecision:
        """Evaluate ``snapshot`` at time ``now``, on the clock of the snapshot."""
        here = present(snapshot)
        decision = hold(why) if (why := self._not_evaluated(snapshot, here)) else self._decide(snapshot, here, now)
        if decision.action == "hold":
            self._held = decision
        elif self._asked is not None:
            # A change that is not carried out is to be found again at the next step.
            self._asked = self._asked._replace(state=State(0, 0))
        return decision

    def _not_evaluated(self, snapshot: PlanSnapshot, here: State) -> str:
        """Why nothing is played; empty: it is."""
        if not self._settings.enabled:
            return "the planner is disabled"
        movable = any((n.component == "hybrid" and n.role != "lost") or n.shares for n in snapshot.nodes)
        if not movable and self._layouts is None and snapshot.borrow is None:
            return "there is no hybrid node to move"
        for node in snapshot.nodes:
            if node.role in ("to_train", "to_rollout", "starting"):
                return f"node {node.rank} is in state {node.role}"
        return "" if here.train and here.rollout else "one of the stages has no node"

    def _decide(self, snapshot: PlanSnapshot, here: State, now: float) -> PlanDecision:
        if self._way is None or self._way[0] != here.in_turn:
            self._way = here.in_turn, now if self._way else -inf
        groups = coming_work(snapshot)
        steps = [s for s in snapshot.steps if s.nodes == here.train and s.tokens and s.at > self._way[1]][-STEPS:]
        if len(steps) < LEAST_STEPS or len(groups) < snapshot.prompts_per_step or not snapshot.step_costs:
            engines = "" if snapshot.step_costs else ", no engine's steps"
            return hold(
                f"{len(steps)} of {LEAST_STEPS} steps with {here.train} training nodes, {len(groups)} of"
                f" {snapshot.prompts_per_step} groups{engines} measured"
            )
        triggers = self._triggers(snapshot, here, groups, now)
        if not triggers:
            return self._held
        plays = Plays(self._play, self._work(snapshot, groups, here.train), ROUNDS)
        if why := plays.measured(here, (steps[-1].at - steps[0].at) / (len(steps) - 1), self._ratios):
            return hold(f"the coming work cannot be played: {why}")
        return replace(self._choice(snapshot, plays, here, now), triggers=triggers)

    def _choice(self, snapshot: PlanSnapshot, plays: Plays, here: State, now: float) -> PlanDecision:
        """The first change that pays, else a hold."""
        if (found := way_choice(snapshot, plays, here, self._settings)) is not None:
            return found
        seconds = plays.at(here)
        horizon = min(max(self._settings.horizon_s, BATCHES * seconds.batch), snapshot.steps_left * seconds.batch)
        found = move_choice(snapshot, plays, here, self._settings, horizon=horizon, now=now)
        blocked = any(candidate.blocked for candidate in found.candidates)
        if found.action == "hold" and not blocked and self._search_is_due(snapshot, now):
            found = self._other_layout(found, snapshot, plays, here, horizon)
        return with_borrowed(found, snapshot, plays, here, self._settings, now) if found.action == "hold" else found

    def _search_is_due(self, snapshot: PlanSnapshot, now: float) -> bool:
        """Whether a period has passed since the last search, and the work is another one than then.

        A layout that a repartition chose stays until the work changes. Otherwise two layouts could take turns.
        """
        asked = self._asked
        if self._layouts is None or asked is None or now < self._repartition_after:
            return False
        if any(node.role == "lost" for node in snapshot.nodes):
            return False  # a restart needs every node
        if self._searched is None:
            # The run has just begun, in a layout that was chosen for its work where it is after a repartition.
            self._searched = asked
            if self._repartition_after == -inf:
                self._searched = asked._replace(generated=0.0, context=0.0, error=0.0)
        searched = self._searched
        return now - searched.at >= self._settings.period_s and asked.is_other_work(searched)

    def _other_layout(
        self, held: PlanDecision, snapshot: PlanSnapshot, plays: Plays, here: State, horizon: float
    ) -> PlanDecision:
        assert self._layouts is not None
        self._searched = self._asked
        seconds = plays.at(here)
        try:
            layouts = self._layouts(plays.work, here.train, seconds.train)
        except (UserError, OperationError) as error:
            return replace(held, reason=f"{held.reason}; other layouts cannot be played: {error}")
        new = [one for one in layouts if one.words not in self._proposed]
        if not new:
            return held
        found = layout_choice(held, snapshot, plays, new, here, horizon, self._settings)
        self._proposed |= {found.layout} - {""}
        return found

    def _work(self, snapshot: PlanSnapshot, groups: list[list[TrajectoryFact]], train: int) -> PlayWork:
        """The coming work, with the training seconds that ``train`` nodes were measured to take."""
        self._measured |= _per_token(snapshot, train)
        measured = self._measured

        def train_seconds(tokens: int, nodes: int) -> float:
            per_token = measured.get(nodes, measured[train] * (train / nodes) ** SCALING)
            return tokens / snapshot.sampled_groups * per_token

        size = round(snapshot.prompts_per_step * snapshot.sampled_groups)
        switches_s = switch_cost(self._settings, "to_train", snapshot) + switch_cost(
            self._settings, "to_rollout", snapshot
        )
        return PlayWork(records(groups), size, snapshot.eta, snapshot.step_costs, train_seconds, switches_s)

    def _triggers(
        self, snapshot: PlanSnapshot, here: State, groups: Sequence[Sequence[TrajectoryFact]], now: float
    ) -> tuple[str, ...]:
        """Why the work is played now; empty: it is not."""
        last = self._asked
        if last is not None and last.steps_left == snapshot.steps_left:
            return ()
        (generated, error), (context, _) = means(groups)
        offers = frozenset(one.name for one in snapshot.borrow.offers) if snapshot.borrow else frozenset()
        asked = _Asked(here, generated, context, error / generated, now, snapshot.steps_left, offers)
        found: tuple[str, ...] = ("start",)
        if last is not None:
            holds = {
                "drift": asked.differs(last, CHANGED),
                "split": last.state != here,
                "offers": last.offers != offers,
                "period": now - last.at >= self._settings.period_s,
            }
            found = tuple(name for name, one in holds.items() if one)
        if found:
            self._asked = self._seen[here.in_turn] = asked
            other = self._seen.get(not here.in_turn)
            if other is not None and asked.is_other_work(other):
                self._ratios.pop(not here.in_turn, None)
        return found


def _per_token(snapshot: PlanSnapshot, here: int) -> dict[int, float]:
    """Training seconds of a token by nodes, where enough steps were measured."""
    found: dict[int, list[float]] = {}
    for step in snapshot.steps:
        if step.tokens:
            found.setdefault(step.nodes, []).append(step.seconds / step.tokens)
    return {n: median(seen[-STEPS:]) for n, seen in found.items() if n == here or len(seen) >= ELSEWHERE}
