"""Rules that move nodes, judged by the simulator on a drifting workload and an elastic pool.

- `Static`: never moves.
- `Live`: the live `Planner`, with the snapshot of a live run.
- `replan_tiers.Tiers`: the same with repartitions.
- `VerlLike` (`replan_verl`): the published adaptive rule of another framework.
- `Schedule`: moves at stated steps; with `best_schedule` it is the clairvoyant.

The clairvoyant has the step times of every static run. `best_schedule` is the cheapest path through (step, split). It
is run like any other rule, with orders one or two steps ahead. It is a strong plan, not a proved bound, because a batch
that is half done at a move takes other times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Protocol

import msgspec

from bench.replan_pool import ReplanPool, Site, StepTruth
from bench.replan_view import View, Watched
from libra_hpc.config.rollout import PlannerSection
from libra_hpc.models.devices import device
from libra_hpc.models.shapes import model_shape
from libra_hpc.policies.control.decide import MoveOutcome, Planner
from libra_hpc.policies.costs.rollout_by_nodes import NodeEngines, RolloutByNodes
from libra_hpc.policies.costs.rollout_time import RolloutOptions
from libra_hpc.policies.scheduling.registry import make_policy
from libra_hpc.protocol.plan import PlanDecision
from libra_hpc.protocol.trace import TrajectoryRecord
from libra_hpc.simulator.simulate import Simulation

ACT_S = 10.0
"""Seconds between two calls of a rule."""
POLICY = "sticky"
"""Turns return to the engine with their context; the engines are alike, so no policy can do much better."""

SETTINGS = PlannerSection(interval_s=20.0, horizon_s=3600.0, switch_cost_s=60.0, min_dwell_s=60.0)
"""``[planner]`` of these runs: batches take minutes, so interval, horizon and prior cost are those of a large run."""


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
    """When all ranks worked again after each repartition."""

    @property
    def tokens_s(self) -> float:
        """End-to-end throughput."""
        return self.tokens / self.seconds


class Rule(Protocol):
    """Moves nodes of a pool."""

    def act(self, pool: ReplanPool, sim: Simulation, view: View, now: float) -> None:
        """Called every `ACT_S` seconds."""


class Static:
    """Never moves."""

    def act(self, pool: ReplanPool, sim: Simulation, view: View, now: float) -> None:
        """Nothing."""


class Live:
    """The planner of a live run, by default without repartitions; orders are carried out at once."""

    def __init__(self, settings: PlannerSection, site: Site, planner: Planner | None = None) -> None:
        node = NodeEngines(model_shape(site.model), device(site.device), ((site.tp, 1),), RolloutOptions(site.slots))
        self.planner = planner or Planner(settings, RolloutByNodes(node, lambda device, shape, tp: site.steps()))
        self.decisions: list[PlanDecision] = []
        self.evaluations = 0
        self._interval_s = settings.interval_s
        self._next = 0.0

    def act(self, pool: ReplanPool, sim: Simulation, view: View, now: float) -> None:
        """Ask the planner and carry out its decision."""
        if pool.moving or now < self._next:
            return
        self._next = now + self._interval_s
        self.evaluations += 1
        decision = self.planner.decide(view.snapshot(sim), now)
        if decision.action != "hold":
            self.decisions.append(decision)
            self.obey(decision, pool, sim=sim, view=view, now=now)

    def obey(self, decision: PlanDecision, pool: ReplanPool, sim: Simulation, view: View, now: float) -> None:
        """Carry out a decision other than hold."""
        for rank in decision.nodes:
            pool.order(sim, decision.action, rank, now)


class Schedule:
    """``splits[k]`` training nodes for step k, ordered ``lead`` steps before."""

    def __init__(self, splits: Sequence[int], lead: int) -> None:
        self._splits, self._lead = splits, lead

    def act(self, pool: ReplanPool, sim: Simulation, view: View, now: float) -> None:
        """Order the missing moves."""
        if pool.moving:
            return
        step = min(len(sim.training.steps) + self._lead, len(self._splits) - 1)
        missing = self._splits[step] - pool.count("train")
        role, direction = ("rollout", "to_train") if missing > 0 else ("train", "to_rollout")
        for node in [n for n in pool.nodes if n.component == "hybrid" and n.role == role][: abs(missing)]:
            pool.order(sim, direction, node.rank, now)


def play(site: Site, work: Sequence[TrajectoryRecord], rule: Rule, train: int, seed: int) -> Played:
    """Run ``work`` from a split with ``train`` training nodes."""
    pool, truth, watched = ReplanPool(site, train), StepTruth(site, seed), Watched(make_policy(POLICY))
    steps = len(work) // (site.prompts * site.group)
    view = View(pool, watched, truth, steps)

    def control(sim: Simulation, now: float) -> None:
        view.close_window(sim, now)
        rule.act(pool, sim, view, now)

    result = pool.simulation(work, watched, truth=truth, control=control, control_s=ACT_S).run()
    ends = [s.end_at for s in result.steps]
    live = rule if isinstance(rule, Live) else None
    return Played(
        seconds=ends[-1],
        tokens=sum(s.tokens for s in result.steps),
        ends=ends,
        moves=len(pool.ordered),
        switching_s=sum(s.seconds for s in pool.switches),
        decisions=live.decisions if live else [],
        outcomes=live.planner.outcomes if live else [],
        repartitioned=pool.repartitioned,
    )


def best_schedule(runs: dict[int, Played], switch_s: float) -> list[int]:
    """Training nodes per step: the cheapest path when each step takes its time under that static split.

    A change costs ``switch_s`` seconds.
    """
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
    """The same ends, each step's length averaged with its neighbours': what one batch shifts to the next is no gain."""
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
    """The better of two schedules, with orders one and two steps ahead."""
    splits = best_schedule(statics, switch_s)
    return min((run(Schedule(splits, lead), splits[0]) for lead in (1, 2)), key=lambda played: played.seconds)
