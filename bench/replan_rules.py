"""Rules that move nodes, judged by the simulator on a drifting workload and an elastic pool.

- `Static`: never moves.
- `Live`: the live `Player`, with the snapshot of a live run.
- `VerlLike`: the published adaptive rule of another framework.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from bench.controlled_simulation import ControlledSimulation
from bench.replan_pool import ReplanPool, Site, StepTruth
from bench.replan_view import View
from libra_hpc.config.rollout import PlannerSection
from libra_hpc.planning.live_play import LivePlay
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
    steps: int
    moves: int
    """Node moves that were ordered."""
    switching_s: float
    """Node seconds between order and work in the new role."""
    decisions: list[PlanDecision]
    """Other than ``hold``."""


class Rule(Protocol):
    """Moves nodes of a pool."""

    def act(self, pool: ReplanPool, sim: ControlledSimulation, view: View, now: float) -> None:
        """Called every `ACT_S` seconds."""


class Static:
    def act(self, pool: ReplanPool, sim: ControlledSimulation, view: View, now: float) -> None:
        """Never acts."""


class Live:
    """The planner of a live run without repartitions; orders are carried out at once."""

    def __init__(self, settings: PlannerSection, site: Site) -> None:
        limits = SimulationSettings(max_num_seqs=site.slots, max_inflight=site.slots * 3 // 2, report_s=REPORT_S)
        self._planner = Player(settings, LivePlay(((site.tp, 1),), POLICY, limits))
        self.decisions: list[PlanDecision] = []
        self.evaluations = 0
        self._interval_s = settings.interval_s
        self._next = 0.0

    def act(self, pool: ReplanPool, sim: ControlledSimulation, view: View, now: float) -> None:
        if pool.moving or now < self._next:
            return
        self._next = now + self._interval_s
        self.evaluations += 1
        decision = self._planner.decide(view.snapshot(sim), now)
        if decision.action != "hold":
            self.decisions.append(decision)
            for rank in decision.nodes:
                pool.order(sim, decision.action, rank, now)


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
                spec = pool.engine(node.rank)
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
    pool, truth = ReplanPool(site, train), StepTruth(site, seed)
    view = View(pool, truth, len(work) // (site.prompts * site.group))

    def control(sim: ControlledSimulation, now: float) -> None:
        pool.advance(sim, now)
        view.look(sim)
        rule.act(pool, sim, view, now)

    result = pool.simulation(work, make_policy(POLICY), truth, controller=control, controller_s=ACT_S).run()
    return Played(
        seconds=result.steps[-1].end_at,
        tokens=sum(s.tokens for s in result.steps),
        steps=len(result.steps),
        moves=pool.moves,
        switching_s=sum(s.seconds for s in pool.switches),
        decisions=rule.decisions if isinstance(rule, Live) else [],
    )
