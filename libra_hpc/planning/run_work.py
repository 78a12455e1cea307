"""What the nodes of a run file do, as the cost models take it: their memory, and layouts of training worlds."""

from __future__ import annotations

import os

import msgspec

from libra_hpc.config.node_groups import TrainWorld, core_world
from libra_hpc.config.run import RunConfig
from libra_hpc.models.capacity import MIB
from libra_hpc.models.host_memory import NodeWork
from libra_hpc.models.memory import TrainLayout
from libra_hpc.models.shapes import ModelShape, model_shape


def reference_shape(config: RunConfig, policy: ModelShape) -> ModelShape | None:
    """The reference policy's, in the trainer's type; that of ``policy`` where no folder is named, None without one."""
    algorithm = config.algorithm
    if not algorithm.has_reference or not os.path.isdir(algorithm.reference):
        return policy if algorithm.has_reference else None
    return msgspec.structs.replace(model_shape(algorithm.reference), dtype_bytes=policy.dtype_bytes)


def node_work(config: RunConfig, name: str, reference: ModelShape | None) -> NodeWork:
    """What a node of a component does with its memory; ``reference``: the one that it has."""
    task, environments, parts = config.task, 0.0, config.components
    copied = config.algorithm.minibatches > 1 and parts.hybrid.nodes > 0
    # The address space is a limit, far above what most tools take: it counts where the user chose it.
    if name == "rollout" and "task.tool_memory_mb" in config.given:
        environments = float(task.hosts * task.tool_processes * task.tool_memory_mb * MIB)
    return NodeWork(
        reference=float(reference.weight_bytes) if reference else 0.0,
        elastic_nodes=parts.hybrid.nodes_per_replica,
        rolls=len(config.rollout_nodes(name)) > 0,
        trains=name != "rollout",
        engines=_engines(config, name),
        snapshots=name == "train" and config.train.snapshot_every > 0,
        core_nodes=parts.train.nodes if name == "train" else 0,
        states=config.optimizer.host * (1 + copied),
        environment_bytes=environments,
    )


def _engines(config: RunConfig, name: str) -> int:
    """Most engines of a node of a component."""
    return max((config.rollout.on_node(node)[1] for node in config.rollout_nodes(name)), default=1)


def core_layout(config: RunConfig) -> TrainLayout:
    """The layout of a run's core."""
    return world_layout(config, core_world(config))


def world_layout(config: RunConfig, world: TrainWorld, *, elastic: bool = False) -> TrainLayout:
    """The layout of one of a run's worlds; ``elastic``: it has no optimizer."""
    train = config.train
    return TrainLayout(
        tp=world.tp,
        pp=world.pp,
        cp=world.cp,
        ep=world.ep,
        dp=world.dp,
        micro_tokens=train.micro_tokens,
        recompute=train.recompute,
        etp=world.etp,
        elastic=elastic,
        host=config.optimizer.host,
    )
