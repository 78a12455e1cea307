"""The Megatron worlds of a run file: which processes of which nodes train together, and as how many replicas.

All core nodes are one world. A hybrid node is a world of its own, of the same replicas, or several are one together.
Ranks of a world count the processes of its first node first; tensor ranks count fastest, then context ranks,
data-parallel ranks and stages.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from .run import RunConfig


class TrainWorld(NamedTuple):
    tp: int
    pp: int
    cp: int
    ep: int
    """Expert-parallel ranks among the processes of a stage."""
    etp: int
    """Tensor ranks of an expert."""
    nodes: int
    processes: int
    """On each node."""

    @property
    def replica(self) -> int:
        """Processes of a data-parallel replica."""
        return self.tp * self.pp * self.cp

    @property
    def ranks(self) -> int:
        return self.nodes * self.processes

    @property
    def dp(self) -> int:
        """Data-parallel replicas; a checked run file has a whole number of them."""
        return max(1, self.ranks // self.replica)


def core_world(config: RunConfig) -> TrainWorld:
    """The world of all core nodes."""
    return _world(config, "train", max(1, config.components.train.nodes))


def elastic_world(config: RunConfig) -> TrainWorld:
    """The world of one hybrid node while it trains, or of ``nodes_per_replica`` of them."""
    return _world(config, "hybrid", config.components.hybrid.nodes_per_replica)


def replicas(config: RunConfig, nodes: int) -> int:
    """Data-parallel replicas of a generation of ``nodes``: all core nodes, and hybrid ones."""
    core, elastic = core_world(config), elastic_world(config)
    return core.dp + elastic.dp * ((nodes - core.nodes) // elastic.nodes) if nodes else 0


def _world(config: RunConfig, component: Literal["train", "hybrid"], nodes: int) -> TrainWorld:
    train = config.train
    world = TrainWorld(train.tp, train.pp, train.cp, train.ep, train.etp or train.tp, nodes, 0)
    return world._replace(processes=train.processes or _processes(config, component, world.replica))


def _processes(config: RunConfig, component: Literal["train", "hybrid"], replica: int) -> int:
    """One for each GPU that whole replicas take; without GPUs those of one replica."""
    gpus = getattr(config.components, component).gpus
    if not gpus or (config.slurm.device == "cpu" and config.run.engine == "real"):
        return replica
    return gpus // replica * replica or gpus
