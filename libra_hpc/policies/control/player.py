"""The best split of hybrid nodes: the coming batches are played with every split that they can reach.

- Training seconds of a token are measured here; n nodes are ``(here / n) ** SCALING`` of that.
- The coming work (`coming_work`) is played with this split, then downhill with its neighbours, both ways.
- A batch at another split takes the measured seconds here times played there over played here.
- Gain below ``min_gain``, or over the horizon at most ``margin`` switches as measured -> hold.
- A node younger than ``min_dwell_s``, or the hour's moves used up -> hold.
- A gain below `SURE` -> the move is made when the next step asks for it again; a move back, after `BACK` steps.
- No step has ended, or the work is the same as before -> the last hold stays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from math import inf
from statistics import fmean, median
from typing import NamedTuple

from msgspec.structs import replace

from libra_hpc.config.rollout import PlannerSection
from libra_hpc.protocol.engine_state import StepCosts
from libra_hpc.protocol.plan import Candidate, NodeFact, PlanDecision, PlanSnapshot, TrajectoryFact
from libra_hpc.protocol.trace import TrajectoryRecord

from .coming_work import coming_work, records
from .stage_times import lent_nodes
from .switch_cost import Direction, switch_cost

STEPS = 8
"""Newest steps at this split whose training is measured. Older ones are of another policy."""
LEAST_STEPS = 2
"""Fewest of them."""
ELSEWHERE = 4
"""Fewest steps with another number of nodes whose median replaces scaling: the first one has the regrouping in it."""
SCALING = 0.92
"""Twice the nodes train 2 ** 0.92 = 1.89 times as fast: data-parallel training with its fixed parts."""
BATCHES = 3
"""Batches of a play beyond the staleness bound, so that the pipeline is full."""
CHANGED = 0.05
"""Relative change of the mean lengths after which the same split is played once more before ``period_s`` has passed."""
LEAST_BATCHES = 12
"""Batches of the shortest horizon, unless the run ends before: batches of large runs take many minutes."""
SURE = 0.25
"""Gain that needs no confirmation. Half: noise of short batches moves nodes; double: a wrong start costs a step more.
"""
BACK = 3
"""Steps that must ask for a small move back within the hour. Half: steady work moves two nodes to and fro; double: a
drift is followed late.
"""
HOUR = 3600.0
"""Seconds."""
BOUND = 2.0
"""Most that a measured batch may differ from the played one, as a ratio."""
CANDIDATES = 5
"""Splits that a decision lists."""


class PlayWork(NamedTuple):
    """What is played: the coming trajectories, and what the run has measured."""

    records: list[TrajectoryRecord]
    groups: int
    """Groups of one batch, with those that others replace."""
    eta: int
    costs: tuple[StepCosts, ...]
    train_seconds: Callable[[int, int], float]
    """(tokens, training nodes) -> seconds."""


class Seconds(NamedTuple):
    """Seconds of one batch at a split."""

    train: float
    rollout: float
    batch: float


Play = Callable[[PlayWork, int, int], tuple[float, float]]
"""(work, training nodes, rollout nodes) -> seconds of a batch, and those out of them in which it is rolled out."""


class _Asked(NamedTuple):
    """The work that was played last."""

    split: tuple[int, int]
    generated: float
    context: float
    at: float
    steps_left: int


class Player:
    """Decides from snapshots; keeps what was played last, and the move to be confirmed."""

    def __init__(self, settings: PlannerSection, play: Play) -> None:
        self._settings, self._play = settings, play
        self._measured: dict[int, float] = {}
        """Training seconds of a token by nodes, until they are measured again."""
        self._asked: _Asked | None = None
        self._proposed: tuple[Direction, int] | None = None
        """The move to be confirmed, and the steps that were left then."""
        self._held = _hold("nothing has been played yet")

    def decide(self, snapshot: PlanSnapshot, now: float) -> PlanDecision:
        """Evaluate ``snapshot`` at time ``now``, on the clock of the snapshot."""
        decision = self._decide(snapshot, now)
        if decision.action == "hold":
            self._held = decision
        elif self._asked is not None:
            # A move that is not carried out is to be found again at the next step.
            self._asked = self._asked._replace(split=(0, 0))
        return decision

    def _decide(self, snapshot: PlanSnapshot, now: float) -> PlanDecision:
        roles = [node.role for node in snapshot.nodes]
        train, rollout = roles.count("train"), roles.count("rollout")
        groups = coming_work(snapshot)
        steps = [s for s in snapshot.steps if s.nodes == train and s.tokens][-STEPS:]
        if len(steps) < LEAST_STEPS or len(groups) < snapshot.prompts_per_step or not snapshot.step_costs:
            engines = "" if snapshot.step_costs else ", no engine's steps"
            return _hold(
                f"{len(steps)} of {LEAST_STEPS} steps with {train} training nodes, {len(groups)} of"
                f" {snapshot.prompts_per_step} groups{engines} measured"
            )
        triggers = self._triggers(snapshot, (train, rollout), [t for g in groups for t in g], now)
        if not triggers:
            return self._held
        work = self._work(snapshot, groups, train)
        played = self._downhill(snapshot, work, train, rollout)
        gaps = (steps[-1].at - steps[0].at) / (len(steps) - 1)
        if (here := played[train].batch) == inf:
            return _hold("no engine that was measured holds the longest trajectory")
        scale = min(max(gaps / here, 1.0 / BOUND), BOUND)
        times = {n: Seconds(*(scale * value for value in seconds)) for n, seconds in played.items()}
        return replace(self._choose(snapshot, times, train, now), triggers=triggers)

    def _work(self, snapshot: PlanSnapshot, groups: list[list[TrajectoryFact]], train: int) -> PlayWork:
        """The coming work, with the training seconds that ``train`` nodes were measured to take."""
        self._measured |= _per_token(snapshot, train)
        measured = self._measured

        def train_seconds(tokens: int, nodes: int) -> float:
            per_token = measured.get(nodes, measured[train] * (train / nodes) ** SCALING)
            return tokens / snapshot.sampled_groups * per_token

        size = round(snapshot.prompts_per_step * snapshot.sampled_groups)
        coming = records(groups, (BATCHES + snapshot.eta) * size)
        return PlayWork(coming, size, snapshot.eta, snapshot.step_costs, train_seconds)

    def _triggers(
        self, snapshot: PlanSnapshot, split: tuple[int, int], work: Sequence[TrajectoryFact], now: float
    ) -> tuple[str, ...]:
        """Why the work is played now; empty: it is not."""
        last = self._asked
        if last is not None and last.steps_left == snapshot.steps_left:
            return ()
        generated, context = fmean(t.generated for t in work), fmean(t.context for t in work)
        asked = _Asked(split, generated, context, now, snapshot.steps_left)
        found: tuple[str, ...] = ("start",)
        if last is not None:
            pairs = (generated, last.generated), (context, last.context)
            holds = {
                "drift": any(abs(new - old) > CHANGED * old for new, old in pairs),
                "split": last.split != split,
                "confirm": self._proposed is not None,
                "period": now - last.at >= self._settings.period_s,
            }
            found = tuple(name for name, one in holds.items() if one)
        if found:
            self._asked = asked
        return found

    def _horizon(self, snapshot: PlanSnapshot, batch: float) -> float:
        """Seconds over which a gain counts."""
        return min(max(self._settings.horizon_s, LEAST_BATCHES * batch), snapshot.steps_left * batch)

    def _downhill(self, snapshot: PlanSnapshot, work: PlayWork, train: int, rollout: int) -> dict[int, Seconds]:
        """Played seconds by training nodes, from here both ways as long as they fall."""
        nodes, lent = train + rollout, round(lent_nodes(snapshot))
        tokens = sum(record.context for record in work.records) * work.groups // _groups(work)

        def seconds(n: int) -> Seconds:
            batch, rolls = self._play(work, n, nodes - n + lent)
            return Seconds(work.train_seconds(tokens, n), rolls, batch)

        played = {train: seconds(train)}
        for way, source in ((1, "rollout"), (-1, "train")):
            last = train
            for unit in _units(snapshot, source):
                n = last + way * len(unit)
                if not 0 < n < nodes:
                    break
                played[n] = seconds(n)
                if played[n].batch >= played[last].batch:
                    break
                last = n
        return played

    def _choose(self, snapshot: PlanSnapshot, times: Mapping[int, Seconds], here: int, now: float) -> PlanDecision:
        """The decision for the best split, with its numbers and the best candidates."""
        best = sorted(times, key=lambda n: times[n].batch)[:CANDIDATES]
        before, after = times[here], times[best[0]]
        rolls = sum(node.role == "rollout" for node in snapshot.nodes)
        horizon, gain = self._horizon(snapshot, before.batch), 1.0 - after.batch / before.batch
        direction: Direction = "to_train" if best[0] > here else "to_rollout"
        source, stage, present = ("rollout", "train", rolls) if best[0] > here else ("train", "rollout", here)
        movable = list(chain.from_iterable(_units(snapshot, source)))[: abs(best[0] - here)]
        cost = switch_cost(self._settings, direction, snapshot) * len(movable) / present
        needed = self._settings.margin * cost
        numbers = {
            "train_s": before.train,
            "rollout_s": before.rollout,
            "batch_s": before.batch,
            "after_train_s": after.train,
            "after_rollout_s": after.rollout,
            "after_s": after.batch,
            "pays_s": horizon * gain,
            "cost_s": cost,
            "needed_s": needed,
            "moves_left": float(self._moves_left(snapshot, now)),
        }
        who = f"node{'s' * (len(movable) > 1)} {', '.join(str(node.rank) for node in movable)}"
        what = (
            f"moving {who} to {stage} takes a batch from {before.batch:.2f} s (train {before.train:.2f}, rollout"
            f" {before.rollout:.2f}) to {after.batch:.2f} s (train {after.train:.2f}, rollout {after.rollout:.2f});"
            f" that is {gain:.0%}, and {horizon * gain:.0f} s over the horizon"
        )
        price, blocked = f"{self._settings.margin:.1f} x {cost:.1f} s switch cost", ""
        if not movable:
            why = f"a batch takes {before.batch:.2f} s (train {before.train:.2f}, rollout {before.rollout:.2f})"
            why += ", and no other split takes less"
        elif gain < self._settings.min_gain:
            why = f"{what}, below the least gain of {self._settings.min_gain:.0%}"
        elif horizon * gain <= needed:
            why = f"{what}, which does not pay {price}"
        else:
            blocked = self._blocked(snapshot, movable, direction, gain, now)
            why = f"{blocked}: {what}" if blocked else ""
        if not blocked:
            self._proposed = None
        found = _hold(why, numbers)
        if not why:
            ranks = tuple(node.rank for node in movable)
            found = PlanDecision(direction, ranks[0], f"{direction}: {what}, more than {price}", numbers, nodes=ranks)
        candidates = tuple(
            Candidate(
                train=n,
                rollout=here + rolls - n,
                train_s=times[n].train,
                rollout_s=times[n].rollout,
                batch_s=times[n].batch,
                gain_s=horizon * (1.0 - times[n].batch / before.batch),
                needed_s=needed,
                blocked=blocked if n == best[0] else "",
            )
            for n in best
        )
        return replace(found, candidates=candidates)

    def _moves_left(self, snapshot: PlanSnapshot, now: float) -> int:
        """Node moves that this hour still allows."""
        return max(0, self._settings.moves_per_hour - sum(switch.at > now - HOUR for switch in snapshot.switches))

    def _blocked(
        self, snapshot: PlanSnapshot, nodes: list[NodeFact], direction: Direction, gain: float, now: float
    ) -> str:
        """Why these nodes must not move now, else empty: dwell time, moves per hour, or a gain to be confirmed."""
        young, left = max(nodes, key=lambda node: node.since), self._moves_left(snapshot, now)
        if now - young.since < self._settings.min_dwell_s:
            stayed = f"node {young.rank} has been in {young.role} for {now - young.since:.0f} s"
            return f"{stayed} of at least {self._settings.min_dwell_s:.0f} s"
        if len(nodes) > left:
            return f"{left} of the {self._settings.moves_per_hour} moves an hour are left"
        last = snapshot.switches[-1] if snapshot.switches else None
        back = last is not None and last.at > now - HOUR and last.direction != direction
        if self._proposed is None or self._proposed[0] != direction:
            self._proposed = direction, snapshot.steps_left
        waited = self._proposed[1] - snapshot.steps_left
        return "a later step must confirm this first" if gain < SURE and waited < (BACK if back else 1) else ""


def _groups(work: PlayWork) -> int:
    return len({record.prompt_id for record in work.records})


def _units(snapshot: PlanSnapshot, role: str) -> list[list[NodeFact]]:
    """Hybrid nodes in this role, with those that they move with; the ones that moved longest ago first."""
    together: dict[int, list[NodeFact]] = {}
    for node in snapshot.nodes:
        if node.component == "hybrid":
            together.setdefault(node.rank if node.unit < 0 else node.unit, []).append(node)
    found = [nodes for nodes in together.values() if all(node.role == role for node in nodes)]
    return sorted(found, key=lambda nodes: max((node.since, node.rank) for node in nodes))


def _per_token(snapshot: PlanSnapshot, here: int) -> dict[int, float]:
    """Training seconds of a token by nodes, where enough steps were measured."""
    found: dict[int, list[float]] = {}
    for step in snapshot.steps:
        if step.tokens:
            found.setdefault(step.nodes, []).append(step.seconds / step.tokens)
    return {n: median(seen[-STEPS:]) for n, seen in found.items() if n == here or len(seen) >= ELSEWHERE}


def _hold(why: str, numbers: dict[str, float] | None = None) -> PlanDecision:
    return PlanDecision("hold", -1, f"hold: {why}", numbers or {})
