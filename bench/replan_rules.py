"""Planning judged by the simulator: a drifting workload, an elastic pool, and a rule that moves nodes.

The rollout stage is `Simulation`, training seconds are `replan_pool.StepTruth`; nothing here knows the planner's cost
model.  Rules:

* `Static`: never moves.
* `Live`: the live `Planner`, shown the snapshot a live run would show it.
* `replan_tiers.Tiers`: the same with its second tier, which lays core nodes and engines out anew.
* `VerlLike` (`replan_verl`): the published adaptive rule of another framework.
* `Schedule`: moves at stated steps; with the schedule of `best_schedule` it is the clairvoyant.

The *clairvoyant* knows how long every step takes under every static split, since all of them were played.
`best_schedule` is the cheapest path through (step, split), a change costing ``switch_s``; it is then played like any
other rule, with its orders given one or two steps ahead of time, so it pays for its moves like everybody.  It cannot
know what a mixed run brings (a batch that is half done when nodes change), so it is a strong plan and not a proved
bound.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Protocol

import msgspec

from bench.replan_pool import ReplanPool, Site, StepTruth
from bench.replan_view import View, Watched
from libra_hpc.config.rollout import PlannerSection
from libra_hpc.control.decide import MoveOutcome, Planner
from libra_hpc.cost_models.rollout_by_nodes import NodeEngines, RolloutByNodes
from libra_hpc.cost_models.rollout_time import RolloutOptions
from libra_hpc.hardware.devices import device
from libra_hpc.hardware.models import model_shape
from libra_hpc.protocol.plan import PlanDecision
from libra_hpc.protocol.trace import TrajectoryRecord
from libra_hpc.sched.registry import make_policy
from libra_hpc.simulator.simulate import Simulation

LOOK_S = 10.0
"""Between two looks of a rule."""
POLICY = "sticky"
"""Turns go back to the engine that has their context; all engines are alike here, so no policy can do much better."""

SETTINGS = PlannerSection(interval_s=20.0, horizon_s=3600.0, switch_cost_s=60.0, min_dwell_s=60.0)
"""``[planner]`` of these runs: batches take minutes, not seconds, so looks, horizon and prior cost are those of a
large run."""


class Played(msgspec.Struct, frozen=True):
    """One run."""

    seconds: float
    tokens: int
    """Trained on."""
    ends: list[float]
    """When each step ended."""
    moves: int
    """Node moves that were ordered."""
    switching_s: float
    """Node seconds between order and work in the new role."""
    decisions: list[PlanDecision]
    """Other than ``hold``."""
    outcomes: list[MoveOutcome]
    repartitioned: list[float]
    """When the ranks worked again, each time they had been repartitioned."""

    @property
    def tokens_s(self) -> float:
        """End-to-end throughput."""
        return self.tokens / self.seconds


class Rule(Protocol):
    """Moves nodes of a pool."""

    def look(self, pool: ReplanPool, sim: Simulation, view: View, now: float) -> None:
        """Called every `LOOK_S` seconds."""


class Static:
    """Never moves."""

    def look(self, pool: ReplanPool, sim: Simulation, view: View, now: float) -> None:
        """Nothing."""


class Live:
    """The planner of a live run, by default one with the first tier alone; every order of a decision is carried out
    at once."""

    def __init__(self, settings: PlannerSection, site: Site, planner: Planner | None = None) -> None:
        node = NodeEngines(model_shape(site.model), device(site.device), ((site.tp, 1),), RolloutOptions(site.seats))
        self.planner = planner or Planner(settings, RolloutByNodes(node, lambda device, shape, tp: site.steps()))
        self.decisions: list[PlanDecision] = []
        self.looks = 0
        self._interval_s = settings.interval_s
        self._next = 0.0

    def look(self, pool: ReplanPool, sim: Simulation, view: View, now: float) -> None:
        """Ask the planner and obey."""
        if pool.moving or now < self._next:
            return
        self._next = now + self._interval_s
        self.looks += 1
        decision = self.planner.decide(view.snapshot(sim), now)
        if decision.action != "hold":
            self.decisions.append(decision)
            self.obey(decision, pool, sim, view, now)

    def obey(self, decision: PlanDecision, pool: ReplanPool, sim: Simulation, view: View, now: float) -> None:
        """Carry out what is not a hold."""
        for rank in decision.nodes:
            pool.order(sim, decision.action, rank, now)


class Schedule:
    """``splits[k]`` training nodes for step k (from 0); orders are given ``lead`` steps before."""

    def __init__(self, splits: Sequence[int], lead: int) -> None:
        self._splits, self._lead = splits, lead

    def look(self, pool: ReplanPool, sim: Simulation, view: View, now: float) -> None:
        """Order what is missing."""
        if pool.moving:
            return
        step = min(len(sim.training.steps) + self._lead, len(self._splits) - 1)
        missing = self._splits[step] - pool.count("train")
        role, direction = ("rollout", "to_train") if missing > 0 else ("train", "to_rollout")
        for node in [n for n in pool.nodes if n.component == "hybrid" and n.role == role][: abs(missing)]:
            pool.order(sim, direction, node.rank, now)


def play(site: Site, work: Sequence[TrajectoryRecord], rule: Rule, train: int, seed: int) -> Played:
    """Play ``work`` from a split with ``train`` training nodes."""
    pool, truth, watched = ReplanPool(site, train), StepTruth(site, seed), Watched(make_policy(POLICY))
    steps = len(work) // (site.prompts * site.group)
    view = View(pool, watched, truth, steps)

    def control(sim: Simulation, now: float) -> None:
        view.look(sim, now)
        rule.look(pool, sim, view, now)

    result = pool.simulation(work, watched, truth, control, LOOK_S).run()
    ends = [s.end_at for s in result.steps]
    live = rule if isinstance(rule, Live) else None
    return Played(
        ends[-1],
        sum(s.tokens for s in result.steps),
        ends,
        len(pool.ordered),
        sum(s.seconds for s in pool.switches),
        live.decisions if live else [],
        live.planner.outcomes if live else [],
        pool.repartitioned,
    )


def best_schedule(runs: dict[int, Played], switch_s: float) -> list[int]:
    """Training nodes for each step: the cheapest path when step k takes what it took under each static split and a
    change costs ``switch_s`` seconds."""
    splits = sorted(runs)
    lasted = {n: [b - a for a, b in pairwise([0.0, *_smooth(runs[n].ends)])] for n in splits}
    cost = {n: lasted[n][0] for n in splits}
    came: list[dict[int, int]] = []
    for step in range(1, len(lasted[splits[0]])):
        before = cost
        source = {n: min(splits, key=lambda m: before[m] + (switch_s if m != n else 0.0)) for n in splits}
        cost = {n: before[source[n]] + (switch_s if source[n] != n else 0.0) + lasted[n][step] for n in splits}
        came.append(source)
    path = [min(splits, key=lambda n: cost[n])]
    for source in reversed(came):
        path.append(source[path[-1]])
    return path[::-1]


def _smooth(ends: Sequence[float]) -> list[float]:
    """The same ends, with each step's length averaged over itself and its neighbours: what one batch shifts to the
    next is nobody's gain."""
    lengths = [b - a for a, b in pairwise([0.0, *ends])]
    out, total = [], 0.0
    for i in range(len(lengths)):
        near = lengths[max(0, i - 1) : i + 2]
        total += sum(near) / len(near)
        out.append(total)
    return out


Player = Callable[[Rule, int], Played]
"""(rule, training nodes at the start) -> run, with site, work and seed fixed."""


def clairvoyant(run: Player, statics: dict[int, Played], switch_s: float) -> Played:
    """The better of two played schedules: orders one step ahead, and two."""
    splits = best_schedule(statics, switch_s)
    return min((run(Schedule(splits, lead), splits[0]) for lead in (1, 2)), key=lambda played: played.seconds)
