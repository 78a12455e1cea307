"""The live planner with repartitions, in the simulator.

The site is written as a run file, and `libra_hpc.planning.live` makes the planner, as in a live run. After a proposal,
the pool stops at the next step boundary and restarts in the new layout, with a new planner. At most one in an hour
(`libra_hpc.policies.control.repartition_choice.EVERY_S`).

The simulator's training seconds do not depend on the parallelism within a node. A gain predicted from another TP or PP
does not appear.
"""

from __future__ import annotations

from typing import Any

from bench.replan_pool import Grouped, Layout, ReplanPool, Site
from bench.replan_rules import POLICY, Live
from bench.replan_view import View
from libra_hpc.config.load import validate, with_values
from libra_hpc.config.rollout import PlannerSection
from libra_hpc.config.run import RunConfig
from libra_hpc.models.devices import Device
from libra_hpc.models.shapes import ModelShape
from libra_hpc.models.step_times.lookup import lookup
from libra_hpc.models.step_times.steps import StepTimes
from libra_hpc.planning.live import live_planner
from libra_hpc.policies.control.decide import Planner
from libra_hpc.policies.control.repartition_choice import EVERY_S
from libra_hpc.protocol.plan import PlanDecision
from libra_hpc.simulator.simulate import Simulation


class Tiers(Live):
    """`Live` with repartitions."""

    def __init__(self, settings: PlannerSection, site: Site) -> None:
        self._site, self._config, self._starts = site, run_file(site, settings), 0
        super().__init__(settings, site, self._begun())

    def act(self, pool: ReplanPool, sim: Simulation, view: View, now: float) -> None:
        """The same; a restart begins with a new planner and its time."""
        if len(pool.repartitioned) > self._starts:
            self._starts = len(pool.repartitioned)
            view.restart(sim)
            self.planner = self._begun()
            self.planner.repartition_after = now + EVERY_S
        super().act(pool, sim, view, now)

    def obey(self, decision: PlanDecision, pool: ReplanPool, sim: Simulation, view: View, now: float) -> None:
        """Move nodes, or restart all."""
        if decision.action != "repartition":
            super().obey(decision, pool, sim=sim, view=view, now=now)
            return
        self._config = with_values(self._config, decision.changes)
        pool.repartition(sim, layout_of(self._config))

    def _begun(self) -> Planner:
        def steps(device: Device, shape: ModelShape, tp: int) -> StepTimes:
            return Grouped(lookup(device, shape, tp), self._site.stands_for)

        return live_planner(self._config, steps)


def run_file(site: Site, settings: PlannerSection) -> RunConfig:
    """The site as a run file."""
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
        "planner": settings.model_dump(),
    }
    return validate(data)


def layout_of(config: RunConfig) -> Layout:
    """Nodes and engines of a run file."""
    parts = config.components
    nodes = range(parts.hybrid.nodes + parts.rollout.nodes)
    engines = tuple(config.rollout.on_node(i) for i in nodes)
    return Layout((parts.train.nodes, parts.rollout.nodes), engines)
