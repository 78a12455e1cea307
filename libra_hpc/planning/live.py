"""The planner of a live run: with cost models where device and model are in the tables, else with measurements alone.

- CPU nodes, unknown model or device -> measurements only: even division, corrected by moves.
- Engines of several TP degrees under a policy that does not sort by length -> the same.
- Training and rollout nodes of different kinds -> `RolloutByNodes`, no repartition: nodes cannot change places.
- One kind, but unequal shares of the nodes -> repartitions are advice only.
- Otherwise -> `RolloutByNodes` and `RepartitionAdvisor`.

In a dry run, step times are divided by ``simulated.speedup``, as all seconds are.
"""

from __future__ import annotations

from typing import Any

import msgspec

from libra_hpc.config.run import RunConfig
from libra_hpc.config.train_world import elastic_world
from libra_hpc.errors import UserError
from libra_hpc.models.devices import Device
from libra_hpc.models.memory import RECOMPUTE
from libra_hpc.models.shapes import ModelShape
from libra_hpc.models.step_times.lookup import StepLookup, lookup
from libra_hpc.models.step_times.steps import StepTimes
from libra_hpc.policies.control.decide import Mover, Planner
from libra_hpc.policies.control.repartition_choice import RepartitionAdvisor, RunningLayout
from libra_hpc.policies.control.rollout_by_nodes import NodeEngines, RolloutByNodes
from libra_hpc.policies.search.run_plan import RunPlan
from libra_hpc.simulator.settings import SimulationSettings

from .initial import hybrid_of, interchangeable, run_file_values
from .live_child import PlaySetup
from .measured_train_speed import core_layout
from .request import as_planned, request

REPORT_S = 5.0
"""Seconds between two reports of a played engine: batches of large runs take many minutes."""


class SpedUpSteps:
    """Step times on a clock that runs ``speedup`` times as fast."""

    def __init__(self, steps: StepTimes, speedup: float) -> None:
        self.tp, self.kv_capacity, self.source = steps.tp, steps.kv_capacity, steps.source
        self._steps, self._speedup = steps, speedup

    def step_s(self, decodes: int, kv_tokens: int, prefill: int = 0, context: int = 0) -> float:
        """Seconds of that clock."""
        return self._steps.step_s(decodes, kv_tokens, prefill, context) / self._speedup


def live_planner(config: RunConfig, mover: Mover, table: StepLookup = lookup) -> Planner:
    """The planner for a run file whose split is filled in; its cost models read step times from ``table``.

    Never raises `UserError`.
    """
    speedup = config.speedup

    def steps(device: Device, shape: ModelShape, tp: int) -> StepTimes:
        found = table(device, shape, tp)
        return found if speedup == 1.0 else SpedUpSteps(found, speedup)

    engines = _engines(config)
    # Under other policies than this one, long trajectories do not go to large TP.
    if (len(engines) > 1 and config.rollout.policy != "cmlfq") or (
        config.run.engine == "real" and config.slurm.device == "cpu"
    ):
        return Planner(config.planner, mover)
    try:
        planned = as_planned(config)
        # Lengths come from the run itself, not from the file of its plan.
        planned = planned.changed(planner={"trace": ""})
        asked = request(planned)
        rolls = asked.pools[-1]
        for tp in {tp for tp, _ in engines}:
            steps(rolls.device, asked.shape, tp)
    except UserError:
        return Planner(config.planner, mover)
    rollout_model = RolloutByNodes(NodeEngines(asked.shape, rolls.device, engines, asked.options), steps)
    if len(asked.pools) > 1:
        return Planner(config.planner, mover, rollout_model)
    hybrid = elastic_world(planned)
    running = RunningLayout(core_layout(planned), config.components.train.nodes, hybrid.dp, engines, hybrid.nodes)
    # All values of recompute are searched: a resolved configuration does not show whether the user chose one.
    space = msgspec.structs.replace(asked.space, recompute=RECOMPUTE)
    batch = asked.batch

    def proposed_values(plan: RunPlan) -> dict[str, Any]:
        layout = plan.train.layout
        # The plan's memory check assumed these two values.
        memory = {"train.micro_tokens": layout.micro_tokens, "train.recompute": layout.recompute}
        return {**run_file_values(config, asked.pools, plan, True), **memory, "planner.hybrid_start": "rollout"}

    parts = config.components
    alike = interchangeable(parts.train, parts.hybrid, parts.rollout)
    repartition = RepartitionAdvisor(
        asked.shape,
        rolls,
        running,
        space=space,
        options=asked.options,
        hybrid=hybrid_of(config, asked.pools),
        minibatches=batch.minibatches,
        forwards=batch.forwards,
        steps=steps,
        run_file_values=proposed_values if alike else None,
    )
    return Planner(config.planner, mover, rollout_model, repartition)


def player_setup(config: RunConfig) -> PlaySetup:
    """What the run's `Player` plays with."""
    rollout, algorithm = config.rollout, config.algorithm
    settings = SimulationSettings(
        max_inflight=rollout.max_inflight,
        max_num_seqs=rollout.max_num_seqs,
        max_model_len=rollout.max_model_len,
        block_size=rollout.block_size,
        async_steps=rollout.async_steps,
        eta=algorithm.eta,
        report_s=REPORT_S,
        keep_kv=rollout.kv_after_update == "keep",
    )
    return PlaySetup(config.planner.model_dump(mode="json"), _engines(config), rollout.policy, settings)


def _engines(config: RunConfig) -> tuple[tuple[int, int], ...]:
    """(TP, engines) of every hybrid and rollout node in rank order; one entry where they are alike."""
    nodes = config.components.hybrid.nodes + config.components.rollout.nodes
    each = tuple(config.rollout.on_node(i) for i in range(nodes))
    return each[:1] if len(set(each)) == 1 else each
