"""The nodes of a job in rank order: which of them are requested together, and what each rank is."""

from __future__ import annotations

from typing import NamedTuple

from .job import Component
from .run import RunConfig

COMPONENTS = ("planner", "train", "hybrid", "rollout")
"""In rank order: MPI ranks count through the components in this order."""
STAGES = COMPONENTS[1:]
"""Those whose nodes train or roll out."""
PLAIN_CPUS, PLAIN_MEM = 1, "2G"
"""Of nodes without GPUs: an agent takes 0.1 GB, an engine of a tiny model on a CPU node 1.5 GB."""
_UNITS = {"K": 1 / 1024, "M": 1.0, "G": 1024.0, "T": 1024.0**2}


class HetGroup(NamedTuple):
    """Nodes of the heterogeneous job that are requested together."""

    name: str
    """The component whose nodes these are."""
    component: Component
    """With the nodes of this group alone."""
    ranks: tuple[str, ...]
    """What each of its nodes runs, one agent each: component names."""


def stages(config: RunConfig) -> dict[str, Component]:
    """Components that train or roll out and have nodes, by name."""
    return {name: part for name in STAGES if (part := getattr(config.components, name)).nodes}


def het_groups(config: RunConfig) -> list[HetGroup]:
    """The groups of the job, in rank order.

    A planner without a node of its own is an agent more on the first train node, which then is a group by itself.
    """
    parts = config.components
    if parts.one_node:
        return [_one_node(config)]
    groups = [HetGroup(name, component, (name,)) for name in COMPONENTS if (component := getattr(parts, name)).nodes]
    if parts.planner.nodes:
        return groups
    first = HetGroup("train", parts.train.model_copy(update={"nodes": 1}), ("planner", "train"))
    rest = HetGroup("train", parts.train.model_copy(update={"nodes": parts.train.nodes - 1}), ("train",))
    return [first, *([rest] if rest.component.nodes else []), *groups[1:]]


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
    return HetGroup("train", parts.train.model_copy(update=update), tuple(ranks))


def first_gpu(config: RunConfig, rank: int) -> int:
    """The first GPU of a rank among those of its node: 0 unless one node carries all agents."""
    if not config.components.one_node:
        return 0
    return sum(getattr(config.components, name).gpus for name in rank_components(config)[1:rank])


def rank_components(config: RunConfig) -> list[str]:
    """Component of every rank."""
    return [rank for group in het_groups(config) for _ in range(group.component.nodes) for rank in group.ranks]


def memory_mb(text: str) -> float:
    """MiB of a Slurm memory size such as ``2G``; a number without a unit is MiB."""
    return float(text[:-1]) * _UNITS[text[-1]] if text[-1] in _UNITS else float(text)
