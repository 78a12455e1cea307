"""The nodes of a job in rank order: which of them are requested together, what each rank is, and which train together.

The worlds of Megatron: all core nodes are one. A hybrid node is a world of its own, of the same replicas, or several
are one together. Ranks of a world count the processes of its first node first; tensor ranks count fastest, then context
ranks, data-parallel ranks and stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import msgspec

from .job import NO_OPTION, Component
from .run import RunConfig

COMPONENTS = ("planner", "train", "hybrid", "rollout", "env")
"""In rank order: MPI ranks count through the components in this order."""
STAGES = COMPONENTS[1:4]
"""Components whose nodes train or roll out."""
PLAIN_CPUS, PLAIN_MEM = 1, "2G"
"""Request of nodes without GPUs: an agent takes 0.1 GB, an engine of a tiny model on a CPU node 1.5 GB."""
_UNITS = {"K": 1 / 1024, "M": 1.0, "G": 1024.0, "T": 1024.0**2}


SHARED = ("partition", "constraint", "reservation", "account", "qos", "gpus", "gpu_type", "extra")
"""Keys in which the components of a plain job agree."""


class HetGroup(NamedTuple):
    """Nodes that are requested together: all of a plain job, or a component of a heterogeneous one."""

    name: str
    """The component whose nodes these are."""
    component: Component
    """With the nodes of this group alone."""
    ranks: tuple[str, ...]
    """What runs there, one agent each, in rank order: component names."""
    first: int = 1
    """Agents on its first node; the others have one each."""

    @property
    def nodes(self) -> int:
        """Nodes that have work; further ones are spare."""
        return len(self.ranks) - self.first + 1


def stages(config: RunConfig) -> dict[str, Component]:
    """Components that train or roll out and have nodes, by name."""
    return {name: part for name in STAGES if (part := getattr(config.components, name)).nodes}


def het_groups(config: RunConfig) -> list[HetGroup]:
    """The groups of the job, in rank order.

    - A planner without a node of its own is an agent more on the first train node.
    - All groups have two nodes or more -> a heterogeneous job: Slurm keeps it when it sets a node down.
    - One has a single node, or a spare is asked for, and they agree in `SHARED` -> a plain job, which Slurm keeps, too.
    - They agree but for environment nodes -> these are a group beside one of all others, to which spare nodes belong.
    """
    parts = config.components
    if parts.one_node:
        return [_one_node(config)]
    groups = [
        HetGroup(name, component, (name,) * component.nodes)
        for name in COMPONENTS
        if (component := getattr(parts, name)).nodes
    ]
    if not parts.planner.nodes and groups:
        groups[0] = HetGroup("train", parts.train, ("planner", *groups[0].ranks), first=2)
    alone = config.slurm.spare > 0 or any(group.nodes == 1 for group in groups)
    if not alone or differing(config, COMPONENTS[:-1]):
        return groups
    apart = groups[-1:] if differing(config) else []
    return [_plain(groups[: len(groups) - len(apart)], config.slurm.spare), *apart]


def differing(config: RunConfig, names: Sequence[str] = COMPONENTS) -> tuple[str, ...]:
    """The keys of `SHARED` in which components with nodes differ."""
    parts = [part for name in names if (part := getattr(config.components, name)).nodes]
    return tuple(key for key in SHARED if any(getattr(part, key) != getattr(parts[0], key) for part in parts))


def _plain(groups: list[HetGroup], spare: int) -> HetGroup:
    """One group with the nodes of all, each with the most CPUs and memory that any of them asks for."""
    head, parts = groups[0], [group.component for group in groups]
    ranks = tuple(rank for group in groups for rank in group.ranks)
    update = {
        "nodes": len(ranks) - head.first + 1 + spare,
        "cpus": max(part.cpus for part in parts),
        "mem": max((part.mem for part in parts), key=lambda mem: memory_mb(mem or PLAIN_MEM) or float("inf")),
    }
    return HetGroup("train", msgspec.structs.replace(head.component, **update), ranks, head.first)


def _one_node(config: RunConfig) -> HetGroup:
    """One node with the resources of all components, and their agents; asked for as a train node is."""
    parts = config.components
    engines = [part for part in (parts.train, parts.hybrid, parts.rollout) for _ in range(part.nodes)]
    cpus = [part.cpus for part in engines]
    memory = [memory_mb(part.mem or PLAIN_MEM) for part in engines]
    update = {
        "nodes": 1,
        "gpus": sum(part.gpus for part in engines),
        "cpus": sum(cpus) if all(cpus) else 0,
        "mem": f"{int(sum(memory))}M" if all(memory) else "0",
    }
    ranks = ["planner", *(name for name in STAGES for _ in range(getattr(parts, name).nodes))]
    return HetGroup("train", msgspec.structs.replace(parts.train, **update), tuple(ranks), first=len(ranks))


def first_gpu(config: RunConfig, rank: int) -> int:
    """The first GPU of a rank among those of its node: 0 unless one node carries all agents."""
    if not config.components.one_node:
        return 0
    return sum(getattr(config.components, name).gpus for name in rank_components(config)[1:rank])


def rank_components(config: RunConfig) -> list[str]:
    """Component of every rank."""
    return [rank for group in het_groups(config) for rank in group.ranks]


def env_ranks(config: RunConfig) -> list[int]:
    """Ranks of the environment nodes."""
    return [rank for rank, name in enumerate(rank_components(config)) if name == "env"]


def memory_mb(text: str) -> float:
    """MiB of a Slurm memory size such as ``2G``; a number without a unit is MiB, and ``none`` is 0."""
    if text == NO_OPTION:
        return 0.0
    return float(text[:-1]) * _UNITS[text[-1]] if text[-1] in _UNITS else float(text)


class Degrees(NamedTuple):
    """How a replica is cut, and the experts of a stage."""

    tp: int
    pp: int = 1
    cp: int = 1
    ep: int = 1
    """Expert-parallel ranks among the processes of a stage."""
    etp: int = 0
    """Tensor ranks of an expert; 0: ``tp``."""

    @property
    def replica(self) -> int:
        """Processes of a data-parallel replica."""
        return self.tp * self.pp * self.cp

    @property
    def expert_processes(self) -> int:
        """Processes that share the experts of a stage."""
        return self.ep * (self.etp or self.tp)

    def __str__(self) -> str:
        """``TP8 PP2``; ``CP2``, ``EP8`` and ``ETP1`` where they are not the default."""
        parts = [f"TP{self.tp}", f"PP{self.pp}"]
        parts += [f"CP{self.cp}"] if self.cp > 1 else []
        parts += [f"EP{self.ep}"] if self.ep > 1 else []
        parts += [f"ETP{self.etp}"] if self.etp not in (0, self.tp) else []
        return " ".join(parts)


class TrainWorld(NamedTuple):
    degrees: Degrees
    nodes: int
    processes: int
    """On each node."""

    @property
    def ranks(self) -> int:
        return self.nodes * self.processes

    @property
    def dp(self) -> int:
        """Data-parallel replicas; a checked run file has a whole number of them."""
        return max(1, self.ranks // self.degrees.replica)


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
    degrees = Degrees(train.tp, train.pp, train.cp, train.ep, train.etp or train.tp)
    return TrainWorld(degrees, nodes, train.processes or _processes(config, component, degrees.replica))


def _processes(config: RunConfig, component: Literal["train", "hybrid"], replica: int) -> int:
    """One for each GPU that whole replicas take; without GPUs those of one replica."""
    gpus = getattr(config.components, component).gpus
    if not gpus or (config.slurm.device == "cpu" and config.run.engine == "real"):
        return replica
    return gpus // replica * replica or gpus
