"""Rules that move nodes, judged by the simulator on a drifting workload and an elastic pool.

- `Static`: never moves.
- `Live`: the live `Player`, with the snapshot of a live run.
- `Tiers`: the same with repartitions.
- `VerlLike`: the published adaptive rule of another framework.
- `Schedule`: moves at stated steps; with `best_schedule` it is the clairvoyant.

The clairvoyant has the step times of every static run. `best_schedule` is the cheapest path through (step, split). It
is run like any other rule, with orders one or two steps ahead. It is a strong plan, not a proved bound, because a batch
that is half done at a move takes other times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from math import inf
from typing import Any, Protocol

import msgspec

from bench.controlled_simulation import ControlledSimulation
from bench.replan_pool import Grouped, Layout, ReplanPool, Site, StepTruth
from bench.replan_view import View, Watched
from libra_hpc.config.load import validate, with_values
from libra_hpc.config.rollout import PlannerSection
from libra_hpc.config.run import RunConfig
from libra_hpc.models.step_times.lookup import lookup
from libra_hpc.planning.live import live_player
from libra_hpc.planning.live_play import LivePlay
from libra_hpc.policies.control.layout_choice import EVERY_S
from libra_hpc.policies.control.player import Player
from libra_hpc.policies.scheduling.registry import make_policy
from libra_hpc.protocol.plan import PlanDecision
from libra_hpc.protocol.trace import TrajectoryRecord
from libra_hpc.simulator.settings import SimulationSettings

REPORT_S = 60.0
"""Seconds between two reports of a played engine."""
ACT_S = 10.0
"""Seconds between two calls of a rule."""
POLICY = "sticky"
"""Turns return to the engine with their context; the engines are alike, so no policy can do much better."""

SETTINGS = PlannerSection(interval_s=20.0, horizon_s=3600.0, switch_cost_s=60.0, min_dwell_s=60.0)
"""``[planner]`` of these runs: batches take minutes, so interval, horizon and prior cost are those of a large run."""
RATIO = 0.3
"""Of `VerlLike`, at the start."""
LEAST, MOST = 0.02, 0.1
"""Bounds of a change of the ratio."""
SWITCHES, SWITCH_S = 3, 10.0
"""Measured cycles, and seconds of one before the first."""
PESSIMISTIC = 1000.0
"""Seconds per sample before a step waited."""


class Played(msgspec.Struct, frozen=True):
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
    repartitioned: list[float]
    """When all ranks worked again after each repartition."""

    @property
    def tokens_s(self) -> float:
        return self.tokens / self.seconds


class Rule(Protocol):
    """Moves nodes of a pool."""

    def act(self, pool: ReplanPool, sim: ControlledSimulation, view: View, now: float) -> None:
        """Called every `ACT_S` seconds."""


class Static:
    def act(self, pool: ReplanPool, sim: ControlledSimulation, view: View, now: float) -> None:
        """Nothing."""


class Live:
    """The planner of a live run, by default without repartitions; orders are carried out at once."""

    def __init__(self, settings: PlannerSection, site: Site, planner: Player | None = None) -> None:
        self.planner = planner or player(settings, site)
        self.decisions: list[PlanDecision] = []
        self.evaluations = 0
        self._interval_s = settings.interval_s
        self._next = 0.0

    def act(self, pool: ReplanPool, sim: ControlledSimulation, view: View, now: float) -> None:
        if pool.moving or now < self._next:
            return
        self._next = now + self._interval_s
        self.evaluations += 1
        decision = self.planner.decide(view.snapshot(sim), now)
        if decision.action != "hold":
            self.decisions.append(decision)
            self.obey(decision, pool, sim=sim, view=view, now=now)

    def obey(self, decision: PlanDecision, pool: ReplanPool, sim: ControlledSimulation, view: View, now: float) -> None:
        for rank in decision.nodes:
            pool.order(sim, decision.action, rank, now)


class Tiers(Live):
    """`Live` with repartitions: the site is written as a run file, and the planner is made as in a live run.

    After a proposal the pool stops at the next step boundary and restarts in the new layout, with a new planner. At
    most one in `EVERY_S`. The simulator's training seconds do not depend on the parallelism within a node: a gain
    predicted from another TP or PP does not appear.
    """

    def __init__(self, settings: PlannerSection, site: Site) -> None:
        self._site, self._config, self._starts = site, run_file(site, settings), 0
        super().__init__(settings, site, self._begun())

    def act(self, pool: ReplanPool, sim: ControlledSimulation, view: View, now: float) -> None:
        if len(pool.repartitioned) > self._starts:
            self._starts = len(pool.repartitioned)
            view.restart(sim)
            self.planner = self._begun(now + EVERY_S)
        super().act(pool, sim, view, now)

    def obey(self, decision: PlanDecision, pool: ReplanPool, sim: ControlledSimulation, view: View, now: float) -> None:
        if decision.action != "repartition":
            super().obey(decision, pool, sim=sim, view=view, now=now)
            return
        self._config = with_values(self._config, decision.changes)
        pool.repartition(sim, layout_of(self._config))

    def _begun(self, after: float = -inf) -> Player:
        size = self._site.stands_for
        return live_player(
            self._config, after, lambda device, shape, tp: Grouped(lookup(device, shape, tp), size), REPORT_S
        )


def player(settings: PlannerSection, site: Site) -> Player:
    """The player of a live run in this process, without other layouts."""
    limits = SimulationSettings(max_num_seqs=site.slots, max_inflight=site.slots * 3 // 2, report_s=REPORT_S)
    return Player(settings, LivePlay(((site.tp, 1),), POLICY, limits))


def run_file(site: Site, settings: PlannerSection) -> RunConfig:
    train, rollout = site.core
    node = {"gpus": site.tp, "gpu_type": site.device}
    data: dict[str, Any] = {
        "slurm": {"device": "cuda"},
        "model": {"path": site.model},
        "components": {
            "train": {"nodes": train, **node},
            "hybrid": {"nodes": site.nodes - train - rollout, **node},
            "rollout": {"nodes": rollout, **node},
        },
        "algorithm": {"prompts_per_step": site.prompts, "group_size": site.group, "eta": site.eta},
        "train": {"tp": site.tp, "recompute": True},
        "rollout": {"tp": site.tp, "max_num_seqs": site.slots, "policy": POLICY, "max_model_len": site.max_model_len},
        "planner": msgspec.to_builtins(settings),
    }
    return validate(data)


def layout_of(config: RunConfig) -> Layout:
    parts = config.components
    nodes = range(parts.hybrid.nodes + parts.rollout.nodes)
    engines = tuple(config.rollout.on_node(i) for i in nodes)
    return Layout((parts.train.nodes, parts.rollout.nodes), engines)


class Schedule:
    """``splits[k]`` training nodes for step k, ordered ``lead`` steps before."""

    def __init__(self, splits: Sequence[int], lead: int) -> None:
        self._splits, self._lead = splits, lead

    def act(self, pool: ReplanPool, sim: ControlledSimulation, view: View, now: float) -> None:
        if pool.moving:
            return
        step = min(len(sim.training.steps) + self._lead, len(self._splits) - 1)
        missing = self._splits[step] - pool.count("train")
        role, direction = ("rollout", "to_train") if missing > 0 else ("train", "to_rollout")
        for node in [n for n in pool.nodes if n.component == "hybrid" and n.role == role][: abs(missing)]:
            pool.order(sim, direction, node.rank, now)


class VerlLike:
    """verl's published adaptive rule for hybrid replicas (`dynamic_schedule`, policy ``default``), on this pool.

    Training always uses the same nodes. Hybrid ones may serve beside the rollout nodes between two steps:

    - Fewer finished samples wait after a step than ratio x samples of a step -> activate. The time of the missing
      samples must exceed the mean of the last `SWITCHES` measured cycles.
    - The threshold is reached -> deactivate; the next step waits until all train again.
    - The trainer waited for samples -> the ratio grows by clip(waited / required, 0.02, 0.1); else it falls by 0.02.
    - Seconds per sample are those of the last step that waited.

    A sample is a group of trajectories. verl aborts the requests of a leaving replica; here they finish first, as for
    every rule. In return a switch takes the authors' 10 s, a seventh of a node's move elsewhere.
    """

    def __init__(self) -> None:
        self.ratio = RATIO
        self.cycles: list[float] = []
        """Seconds of switching, per cycle."""
        self._per_sample = PESSIMISTIC
        self._steps = 0
        self._ready = 0
        """Samples that were finished when the last step ended."""
        self._active: list[str] = []
        self._away = 0
        """Of these: engines that still finish turns."""
        self._leaving = False
        self._asked_at = self._gone_at = 0.0

    def act(self, pool: ReplanPool, sim: ControlledSimulation, view: View, now: float) -> None:
        stage, required = sim.training, pool.site.prompts
        surplus = stage.finished - required * len(stage.steps)
        if self._leaving:
            self._return(sim, now)
        elif self._active and surplus >= self.ratio * required and all(name in sim.engines for name in self._active):
            self._deactivate(sim, now)
        done = len(stage.steps) - (0 if stage.idle else 1)
        if done == self._steps:
            return
        self._steps = done
        self._learn(sim, done, required, surplus)
        gap = self.ratio * required - surplus
        recent = self.cycles[-SWITCHES:]
        cost = sum(recent) / len(recent) if recent else SWITCH_S
        if stage.idle and not self._active and gap > 0.0 and gap * self._per_sample > cost:
            self._activate(pool, sim)

    def _learn(self, sim: ControlledSimulation, done: int, required: int, surplus: int) -> None:
        """Update ratio and seconds per sample after a step."""
        steps = sim.training.steps
        waited = steps[done - 1].start_at - (steps[done - 2].end_at if done > 1 else 0.0)
        missing = max(0, required - self._ready)
        self._ready = surplus
        if missing > 0 and waited > 0.0:
            self._per_sample = waited / missing
            self.ratio = min(1.0, self.ratio + min(MOST, max(LEAST, missing / required)))
        else:
            self.ratio -= LEAST

    def _activate(self, pool: ReplanPool, sim: ControlledSimulation) -> None:
        sim.hold_training(True)
        for node in pool.nodes:
            if node.component == "hybrid" and node.role == "train":
                for spec in pool.engines(node.rank):
                    self._active.append(spec.name)
                    sim.join(spec, SWITCH_S / 2.0)

    def _deactivate(self, sim: ControlledSimulation, now: float) -> None:
        self._leaving, self._asked_at, self._gone_at, self._away = True, now, now, len(self._active)

        def gone() -> None:
            self._away -= 1
            self._gone_at = sim.now

        for name in self._active:
            sim.drain(name, gone)

    def _return(self, sim: ControlledSimulation, now: float) -> None:
        """Train again once the last engine is gone and its memory swapped."""
        if self._away or now < self._gone_at + SWITCH_S / 2.0:
            return
        self._leaving, self._active = False, []
        self.cycles.append(SWITCH_S / 2.0 + now - self._asked_at)
        sim.hold_training(False)


def play(site: Site, work: Sequence[TrajectoryRecord], rule: Rule, train: int, seed: int) -> Played:
    """Run ``work`` from a split with ``train`` training nodes."""
    pool, truth, watched = ReplanPool(site, train), StepTruth(site, seed), Watched(make_policy(POLICY))
    steps = len(work) // (site.prompts * site.group)
    view = View(pool, watched, truth, steps)

    def control(sim: ControlledSimulation, now: float) -> None:
        pool.advance(sim, now)
        view.look(sim)
        rule.act(pool, sim, view, now)

    result = pool.simulation(work, watched, truth, controller=control, controller_s=ACT_S).run()
    ends = [s.end_at for s in result.steps]
    live = rule if isinstance(rule, Live) else None
    return Played(
        seconds=ends[-1],
        tokens=sum(s.tokens for s in result.steps),
        ends=ends,
        moves=len(pool.ordered),
        switching_s=sum(s.seconds for s in pool.switches),
        decisions=live.decisions if live else [],
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


Runner = Callable[[Rule, int], Played]
"""(rule, training nodes at the start) -> run, with site, work and seed fixed."""


def clairvoyant(run: Runner, statics: dict[int, Played], switch_s: float) -> Played:
    """The better of two schedules, with orders one and two steps ahead."""
    splits = best_schedule(statics, switch_s)
    return min((run(Schedule(splits, lead), splits[0]) for lead in (1, 2)), key=lambda played: played.seconds)
