"""The player of a live run, from its run file.

- It plays with the engines of the run, and with step times that these measured, scaled to other TP degrees.
- Device and model are in the tables, and all nodes of one kind -> it searches other layouts too (`OtherLayouts`): what
  `plan` finds for the coming work, with counted training seconds times measured over counted ones of this layout.
- Unequal shares of the nodes -> what it finds is advice only.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from math import inf
from typing import Any

from msgspec.structs import replace

from libra_hpc.config.node_groups import elastic_world
from libra_hpc.config.run import RunConfig
from libra_hpc.errors import UserError
from libra_hpc.models.devices import Device
from libra_hpc.models.memory import RECOMPUTE, core_layout
from libra_hpc.models.shapes import ModelShape
from libra_hpc.models.step_times.lookup import StepLookup, lookup
from libra_hpc.models.step_times.steps import StepTimes
from libra_hpc.models.train_seconds import HybridWorlds, TrainCost, work_of
from libra_hpc.policies.control.layout_choice import OtherLayout
from libra_hpc.policies.control.player import Player
from libra_hpc.policies.control.plays import PlayWork, Seconds
from libra_hpc.simulator.settings import run_settings
from libra_hpc.traces.cut import cut_at
from libra_hpc.traces.run_work import WorkPart, of_trace

from .best_plan import best_plans
from .initial import hybrid_of, interchangeable, run_file_values
from .live_play import LivePlay, as_measured, costs_of
from .request import DevicePool, RunPlan, as_planned, request

REPORT_S = 5.0
"""Seconds between two reports of a played engine: batches of large runs take many minutes."""


def live_player(
    config: RunConfig, repartition_after: float = -inf, table: StepLookup = lookup, report_s: float = REPORT_S
) -> Player:
    """The player for a run file whose split is filled in; KV capacities of other engines are those of ``table``.

    Never raises `UserError`.
    """
    settings, core, engines = replace(run_settings(config), report_s=report_s), core_layout(config), _engines(config)
    play = LivePlay(engines, config.rollout.policy, settings, core if config.streamed else None)
    return Player(config.planner, play, _layouts(config, engines, table), repartition_after)


def _layouts(config: RunConfig, engines: Sequence[tuple[int, int]], table: StepLookup) -> OtherLayouts | None:
    """None where no layout can be found for the run."""
    # Under other policies than this one, long trajectories do not go to large TP.
    if (len(engines) > 1 and config.rollout.policy != "cmlfq") or without_tables(config):
        return None
    try:
        return OtherLayouts(config, table, {tp for tp, _ in engines})
    except UserError:
        return None


def without_tables(config: RunConfig) -> bool:
    """Whether the nodes are in no table of devices."""
    return config.run.engine == "real" and config.slurm.device == "cpu"


def _engines(config: RunConfig) -> tuple[tuple[int, int], ...]:
    """(TP, engines) of every node that rolls out in rank order; one entry where they are alike."""
    each = tuple(config.rollout.on_node(place) for place in config.rollout_places)
    return each[:1] if len(set(each)) == 1 else each


class OtherLayouts:
    """Layouts for a work; ``degrees``: TP of the run's engines.

    Raises `UserError` for unknown hardware or models, and where nodes of two kinds cannot change places.
    """

    def __init__(self, config: RunConfig, table: StepLookup, degrees: Set[int]) -> None:
        # Lengths come from the run itself, not from the file of its plan.
        planned = of_trace(as_planned(config))
        asked = request(planned)
        if len(asked.pools) > 1:
            raise UserError("The nodes are of two kinds: they cannot change places.")
        self._config, self._table, self._degrees = config, table, degrees
        self._pool, self._core, self._own = asked.pools[0], core_layout(planned), elastic_world(planned)
        # All values of recompute are searched: a resolved configuration does not show whether the user chose one.
        space = replace(asked.space, recompute=RECOMPUTE)
        self._asked = replace(asked, space=space, hybrid=hybrid_of(config, asked.pools))
        parts = config.components
        self._alike = interchangeable(parts.train, parts.hybrid, parts.rollout)
        for tp in degrees:
            table(self._pool.device, asked.shape, tp)

    def __call__(self, work: PlayWork, train: int, train_s: float) -> list[OtherLayout]:
        """The best layouts; ``train`` nodes take ``train_s`` for a batch. Raises `UserError` where nothing fits."""
        asked = self._asked
        records = cut_at(work.records, asked.settings.max_model_len).trajectories
        batch = work_of(
            [(one.context, one.generated) for one in records],
            work.groups * asked.work.group,
            minibatches=asked.batch.minibatches,
            reference=asked.batch.reference,
        )
        pool, core = self._pool, self._config.components.train.nodes
        worlds = HybridWorlds(max(0, train - core) // self._own.nodes, self._own.dp)
        counted = TrainCost(asked.shape, pool.device, pool.node_devices, batch)
        factor = train_s / counted.time(self._core, worlds).total
        asked = replace(
            asked,
            batch=batch,
            settings=replace(asked.settings, batch_groups=work.groups),
            work=replace(asked.work, parts=(WorkPart(tuple(records)),)),
            train_factor=factor,
        )
        found = best_plans(asked, lambda device, shape, tp: self._steps(device, shape, tp, work))
        return [self._layout(plan) for plan in found.plans]

    def _steps(self, device: Device, shape: ModelShape, tp: int, work: PlayWork) -> StepTimes:
        """Step times of another degree: measured costs, scaled; the KV capacity as the table has it."""
        measured = min(work.costs, key=lambda one: max(one.tp / tp, tp / one.tp))
        kv_tokens = measured.kv_tokens
        if measured.tp != tp:
            here, there = (self._table(device, shape, degree).kv_capacity for degree in (measured.tp, tp))
            kv_tokens = round(kv_tokens * there / here)
        return as_measured(replace(costs_of(tp, work.costs), kv_tokens=kv_tokens))

    def _layout(self, plan: RunPlan) -> OtherLayout:
        layout, (engines,) = plan.train.layout, plan.engines
        changes: dict[str, Any] = {}
        if self._alike:
            # The plan's memory check assumed these two values.
            memory = {"train.micro_tokens": layout.micro_tokens, "train.recompute": layout.recompute}
            chosen = run_file_values(self._config, (self._pool,), plan, True)
            changes = {**chosen, **memory, "planner.hybrid_start": "rollout"}
        return OtherLayout(
            train=plan.nodes,
            rollout=self._pool.nodes - plan.nodes,
            seconds=Seconds(plan.train.time.total, plan.rollout_s, plan.seconds),
            words=describe(plan, self._pool),
            changes=changes,
            same_engines=engines.tp in self._degrees,
        )


def describe(plan: RunPlan, pool: DevicePool) -> str:
    """A plan in words: nodes, training layout, rollout engines."""
    engines = ", ".join(f"{s.replicas}xTP{s.tp}" for s in plan.engines)
    return (
        f"{plan.nodes} nodes of {pool.node_devices} train with {plan.train.layout}, {pool.nodes - plan.nodes} roll out"
        f" with {engines}"
    )
