"""Rank layouts: what every rank of a job does, and whether a running job can change to another layout.

A layout is given by the keys `KEYS` of the run file.  `repartitioned` checks a change of it for all callers: the
command line, an operator's order, and the planner.

- The number of nodes changes -> refused: a running job has its nodes.
- A rank changes to a component with another partition, GPUs, CPUs or memory -> refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from libra_hpc.config.load import with_values
from libra_hpc.config.node_groups import STAGES, TrainWorld, core_world, elastic_world, stages
from libra_hpc.config.run import RunConfig
from libra_hpc.errors import UserError, invalid
from libra_hpc.planning.initial import SHARE, interchangeable
from libra_hpc.planning.request import KIND

from .checks import check_layout
from .gpu_memory import check_memory

NODES = tuple(f"components.{stage}.nodes" for stage in STAGES)
KEYS = (
    *NODES,
    "components.hybrid.nodes_per_replica",
    "train.tp",
    "train.pp",
    "train.cp",
    "train.ep",
    "train.etp",
    "train.processes",
    "train.micro_tokens",
    "train.recompute",
    "rollout.tp",
    "rollout.engines_per_node",
    "planner.hybrid_start",
)
"""All keys that a repartition can change."""


class SameLayout(UserError):
    """The requested layout is the present one."""

    def __init__(self, config: RunConfig, values: Mapping[str, Any]) -> None:
        self.config = config
        asked = ", ".join(f"{key} = {value!r}" for key, value in values.items())
        super().__init__(f"{asked}: the run has this layout already ({describe(config)}).")


class RankRole(msgspec.Struct, frozen=True):
    """What one rank does."""

    rank: int
    component: str
    replica: TrainWorld | None
    """The world that trains there, or can."""
    engines: tuple[int, int] | None
    """(engines, TP of each) that it has or can have."""

    def __str__(self) -> str:
        train = "" if self.replica is None else str(self.replica.degrees).replace(" PP1", "")
        rollout = "" if self.engines is None else f"{self.engines[0]}xTP{self.engines[1]}"
        return f"{self.component} {' or '.join(filter(None, (train, rollout)))}"


def ranks(config: RunConfig) -> list[RankRole]:
    """What every rank after the planner's does, in rank order; ``config`` has passed its checks."""
    found, position = [], 0
    for rank, stage in enumerate(_stages(config), start=1):
        replica = engines = None
        if stage != "rollout":
            replica = core_world(config) if stage == "train" else elastic_world(config)
        if stage != "train" or config.components.train.roll_out:
            tp, count = config.rollout.on_node(position)
            engines = count, tp
            position += stage != "train"
        found.append(RankRole(rank, stage, replica, engines))
    return found


def describe(config: RunConfig) -> str:
    """A layout in one line: ``2 nodes train with TP2, 1 hybrid, 1 rolls out with 1xTP2``."""
    everyone = ranks(config)
    train, hybrid, rollout = ([rank for rank in everyone if rank.component == stage] for stage in STAGES)
    engines = ", ".join(
        dict.fromkeys(f"{rank.engines[0]}xTP{rank.engines[1]}" for rank in (*hybrid, *rollout) if rank.engines)
    )
    nodes = f"{len(train)} node{'s train' if len(train) > 1 else ' trains'} with {str(train[0]).removeprefix('train ')}"
    middle = f", {len(hybrid)} hybrid" if hybrid else ""
    return f"{nodes}{middle}, {len(rollout)} roll{'' if len(rollout) > 1 else 's'} out with {engines}"


def repartitioned(config: RunConfig, values: Mapping[str, Any]) -> RunConfig:
    """``config`` in another layout; a component that had no nodes takes over the kind of its new ones.

    Raises `UserError` for a key outside `KEYS`, another number of nodes, nodes that cannot change components, and a
    configuration that fails `check_layout` or does not fit in GPU memory.  Raises `SameLayout` for the present layout.
    """
    for key in values:
        if key not in KEYS:
            raise invalid("KEY", key, "not part of a layout", KEYS)
    changed = _same_nodes(config, with_values(config, values))
    if (shape := check_layout(changed)) is not None:
        check_memory(changed, shape)
    if _layout(changed) == _layout(config):
        raise SameLayout(config, values)
    return changed


def _same_nodes(config: RunConfig, changed: RunConfig) -> RunConfig:
    before, after = _stages(config), _stages(changed)
    if len(before) != len(after):
        counts = " + ".join(str(getattr(changed.components, stage).nodes) for stage in STAGES)
        why = f"{' + '.join(NODES)} is the number of nodes of the job, which stays"
        raise invalid(
            "components.*.nodes", counts, why, f"nodes of train, hybrid and rollout that are {len(before)} together"
        )
    kinds = stages(config)
    for rank, (old, new) in enumerate(zip(before, after, strict=True), start=1):
        own = kinds[old]
        there = kinds.setdefault(new, own)
        if not interchangeable(own, there):
            key = next(key for key in (*KIND, *SHARE) if getattr(own, key) != getattr(there, key))
            raise invalid(
                f"components.{new}.nodes",
                getattr(changed.components, new).nodes,
                f"rank {rank} would go from {old} to {new}, but {key} is {getattr(own, key)!r} there and"
                f" {getattr(there, key)!r} here",
                f"changes between components of one {', '.join(KIND)}, {' and '.join(SHARE)}",
            )
    taken = {
        f"components.{stage}.{key}": getattr(kinds[stage], key)
        for stage in kinds
        if not getattr(config.components, stage).nodes
        for key in (*KIND, *SHARE)
    }
    return with_values(changed, taken) if taken else changed


def _stages(config: RunConfig) -> list[str]:
    """Component of every rank after the planner's."""
    return [stage for stage, part in stages(config).items() for _ in range(part.nodes)]


def _layout(config: RunConfig) -> tuple[object, ...]:
    start = config.planner.hybrid_start if config.components.hybrid.nodes else None
    return ranks(config), config.train.micro_tokens, config.train.recompute, start
