"""verl's published adaptive rule for hybrid replicas (`dynamic_schedule`, policy ``default``), on this pool.

Training always uses the same nodes. Hybrid ones may serve beside the rollout nodes between two steps:

- Fewer finished samples wait after a step than ratio x samples of a step -> activate. The time of the missing samples
  must exceed the mean of the last `SWITCHES` measured cycles.
- The threshold is reached -> deactivate; the next step waits until all train again.
- The trainer waited for samples -> the ratio grows by clip(waited / required, 0.02, 0.1); else it falls by 0.02.
- Seconds per sample are those of the last step that waited.

A sample is a group of trajectories. verl aborts the requests of a leaving replica; here they finish first, as for every
rule. In return a switch takes the authors' 10 s, a seventh of a node's move elsewhere.
"""

from __future__ import annotations

from bench.replan_pool import ReplanPool
from bench.replan_view import View
from libra_hpc.simulator.simulate import Simulation

RATIO = 0.3
"""At the start."""
LEAST, MOST = 0.02, 0.1
"""Bounds of a change of the ratio."""
SWITCHES, SWITCH_S = 3, 10.0
"""Measured cycles, and seconds of one before the first."""
PESSIMISTIC = 1000.0
"""Seconds per sample before a step waited."""


class VerlLike:
    """Activates hybrid replicas between steps; see the module."""

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

    def act(self, pool: ReplanPool, sim: Simulation, view: View, now: float) -> None:
        """Activate or deactivate."""
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

    def _learn(self, sim: Simulation, done: int, required: int, surplus: int) -> None:
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

    def _activate(self, pool: ReplanPool, sim: Simulation) -> None:
        sim.hold_training(True)
        for node in pool.nodes:
            if node.component == "hybrid" and node.role == "train":
                for spec in pool.engines(node.rank):
                    self._active.append(spec.name)
                    sim.join(spec, SWITCH_S / 2.0)

    def _deactivate(self, sim: Simulation, now: float) -> None:
        self._leaving, self._asked_at, self._gone_at, self._away = True, now, now, len(self._active)

        def gone() -> None:
            self._away -= 1
            self._gone_at = sim.now

        for name in self._active:
            sim.drain(name, gone)

    def _return(self, sim: Simulation, now: float) -> None:
        """Train again once the last engine is gone and its memory swapped."""
        if self._away or now < self._gone_at + SWITCH_S / 2.0:
            return
        self._leaving, self._active = False, []
        self.cycles.append(SWITCH_S / 2.0 + now - self._asked_at)
        sim.hold_training(False)
