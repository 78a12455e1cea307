"""verl's published adaptive rule for hybrid replicas, on this pool (`dynamic_schedule`, policy ``default``, with its
published constants).

Training always uses the same nodes.  Those of them that are hybrid may, between two steps, serve beside the standalone
rollout nodes:

* After a step they are *activated* if fewer finished samples wait than the wait threshold = ratio x samples of a step,
  and the shortfall's time, missing samples x seconds per sample, exceeds the cost of switching: the mean of the last
  `SWITCHES` = 3 measured cycles, `SWITCH_S` = 10 s before the first.
* They are *deactivated* when the threshold is reached, and the next step waits until all of them train again.
* After each step the ratio, 0.3 at first, grows by clip(waited / required, 0.02, 0.1) if the trainer really waited for
  samples, else it falls by 0.02.
* Seconds per sample are those of the last step that waited, `PESSIMISTIC` = 1,000 before there was one.

A sample is a group of trajectories.  Where verl aborts the requests of a replica that leaves and continues them
elsewhere, they end here, as for every rule; in return a switch is the 10 s its authors take for granted (memory is
swapped in place, no process starts), a seventh of what a node's move costs the others.
"""

from __future__ import annotations

from bench.replan_pool import ReplanPool
from bench.replan_view import View
from libra_hpc.simulator.simulate import Simulation

RATIO = 0.3
LEAST, MOST = 0.02, 0.1
SWITCHES, SWITCH_S = 3, 10.0
PESSIMISTIC = 1000.0


class VerlLike:
    """See the module."""

    def __init__(self) -> None:
        self.ratio = RATIO
        self.cycles: list[float] = []
        """Seconds of switching, per cycle."""
        self._per_sample = PESSIMISTIC
        self._steps = 0
        self._ready = 0
        """Samples that waited when the last step ended."""
        self._active: list[str] = []
        self._away = 0
        """Of these: engines that still have turns to end."""
        self._leaving = False
        self._asked_at = self._gone_at = 0.0

    def look(self, pool: ReplanPool, sim: Simulation, view: View, now: float) -> None:
        """One look."""
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
        """What the step that just ended had waited for."""
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
