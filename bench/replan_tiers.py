"""The second tier in the simulator: the planner of a run file, whose repartitions are carried out.

The site is written as a run file, from which the planner is made by the function a live run uses
(`libra_hpc.planning.live`).  When it proposes another layout, the pool stops at the next step boundary and starts again
in it, and a new planner begins with what is written there, knowing nothing of before, as live.  At most one in an hour
(`libra_hpc.control.repartition_choice.EVERY_S`).

The simulator's training seconds know nothing of the parallelism within a node: what a proposal expects of another TP or
PP does not come.
"""

from __future__ import annotations

from typing import Any

from bench.replan_pool import Grouped, Layout, ReplanPool, Site
from bench.replan_rules import POLICY, Live
from bench.replan_view import View
from libra_hpc.config.load import validate, with_values
from libra_hpc.config.rollout import PlannerSection
from libra_hpc.config.run import RunConfig
from libra_hpc.control.decide import Planner
from libra_hpc.control.repartition_choice import EVERY_S
from libra_hpc.hardware.devices import Device
from libra_hpc.hardware.lookup import lookup
from libra_hpc.hardware.models import ModelShape
from libra_hpc.hardware.steps import StepTimes
from libra_hpc.planning.live import live_planner
from libra_hpc.protocol.plan import PlanDecision
from libra_hpc.simulator.simulate import Simulation


class Tiers(Live):
    """`Live` with both tiers."""

    def __init__(self, settings: PlannerSection, site: Site) -> None:
        self._site, self._config, self._starts = site, run_file(site, settings), 0
        super().__init__(settings, site, self._begun())

    def look(self, pool: ReplanPool, sim: Simulation, view: View, now: float) -> None:
        """The same; a new start knows nothing of before but when it was."""
        if len(pool.repartitioned) > self._starts:
            self._starts = len(pool.repartitioned)
            view.begin_anew(sim)
            self.planner = self._begun()
            self.planner.repartition_after = now + EVERY_S
        super().look(pool, sim, view, now)

    def obey(self, decision: PlanDecision, pool: ReplanPool, sim: Simulation, view: View, now: float) -> None:
        """Move nodes, or start all anew."""
        if decision.action != "repartition":
            super().obey(decision, pool, sim, view, now)
            return
        self._config = with_values(self._config, decision.changes)
        pool.repartition(sim, layout_of(self._config))

    def _begun(self) -> Planner:
        def steps(device: Device, shape: ModelShape, tp: int) -> StepTimes:
            return Grouped(lookup(device, shape, tp), self._site.stands_for)

        return live_planner(self._config, steps)


def run_file(site: Site, settings: PlannerSection) -> RunConfig:
    """The site in the words of a run file."""
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
        "rollout": {"tp": site.tp, "max_num_seqs": site.seats, "policy": POLICY, "max_model_len": site.max_model_len},
        "planner": settings.model_dump(),
    }
    return validate(data)


def layout_of(config: RunConfig) -> Layout:
    """Nodes and engines a run file asks for."""
    parts = config.components
    nodes = range(parts.hybrid.nodes + parts.rollout.nodes)
    engines = tuple(config.rollout.on_node(i) for i in nodes)
    return Layout((parts.train.nodes, parts.rollout.nodes), engines)
