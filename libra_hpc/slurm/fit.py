"""Whether a job can ever start on this cluster: components of the run file against the partitions.

Slurm accepts some impossible requests and leaves the job pending for ever.  For the others it names no field.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from libra_hpc.config.job import Component, SlurmSection
from libra_hpc.config.run import RunConfig
from libra_hpc.errors import UserError, invalid
from libra_hpc.slurm.queue.query import Partition, slurm_seconds

COMPONENTS = ("planner", "train", "hybrid", "rollout")
"""In rank order: MPI ranks count through the components in this order."""
PLAIN_CPUS, PLAIN_MEM = 1, "2G"
"""Of nodes without GPUs: an agent takes 0.1 GB, an engine of a tiny model on a CPU node 1.5 GB."""
LAST_NOTICE_S = 120.0
"""Of Slurm's notice to a run that measures its steps and saves.  Half: a slow save may not fit; double: a run whose
step is late loses it earlier."""
_UNITS = {"K": 1 / 1024, "M": 1.0, "G": 1024.0, "T": 1024.0**2}


class HetGroup(NamedTuple):
    """Nodes of the heterogeneous job that are requested together."""

    name: str
    """The component whose nodes these are."""
    component: Component
    """With the nodes of this group alone."""
    ranks: tuple[str, ...]
    """What each of its nodes runs, one agent each: component names."""


def het_groups(config: RunConfig) -> list[HetGroup]:
    """The groups of the job, in rank order.

    A planner without a node of its own is an agent more on the first train node, which then is a group by itself.
    Raises `UserError` for more than one planner node.
    """
    parts = config.components
    if parts.planner.nodes > 1:
        raise invalid("components.planner.nodes", parts.planner.nodes, "rank 0 alone is the planner", "0 or 1")
    if parts.one_node:
        return [_one_node(config)]
    groups = [HetGroup(name, component, (name,)) for name in COMPONENTS if (component := getattr(parts, name)).nodes]
    if parts.planner.nodes:
        return groups
    if not parts.train.nodes:
        raise invalid("components.planner.nodes", 0, "there is no train node to run it on", "1")
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
    ranks = ["planner", *(name for name in COMPONENTS[1:] for _ in range(getattr(parts, name).nodes))]
    return HetGroup("train", parts.train.model_copy(update=update), tuple(ranks))


def first_gpu(config: RunConfig, rank: int) -> int:
    """The first GPU of a rank among those of its node: 0 unless one node carries all agents."""
    if not config.components.one_node:
        return 0
    return sum(getattr(config.components, name).gpus for name in rank_components(config)[1:rank])


def rank_components(config: RunConfig) -> list[str]:
    """Component of every rank."""
    return [rank for group in het_groups(config) for _ in range(group.component.nodes) for rank in group.ranks]


def with_resources(config: RunConfig, partitions: Sequence[Partition]) -> RunConfig:
    """``config`` with the CPUs and memory of every component that names none.

    GPUs bring their share of the node; where its partition is not known, a CPU each and all of the node's memory.
    Nodes without GPUs get `PLAIN_CPUS` and `PLAIN_MEM`.
    """
    known, default = _by_name(partitions)
    filled = {}
    for name in COMPONENTS:
        component: Component = getattr(config.components, name)
        partition = known.get(component.partition or default)
        cpus, mem = (component.gpus, "0") if component.gpus else (PLAIN_CPUS, PLAIN_MEM)
        if partition is not None and component.gpus and (there := _gpus(component, partition)):
            share = min(1.0, component.gpus / there)
            cpus = max(1, int(partition.cpus * share))
            mem = "0" if share == 1.0 else f"{int(partition.memory_mb * share)}M"
        update = {"cpus": component.cpus or cpus, "mem": component.mem or mem}
        filled[name] = component.model_copy(update=update)
    return config.model_copy(update={"components": config.components.model_copy(update=filled)})


def _by_name(partitions: Sequence[Partition]) -> tuple[dict[str, Partition], str]:
    """Partitions by name, and the name of the default one; empty where there is none."""
    default = next((partition.name for partition in partitions if partition.default), "")
    return {partition.name: partition for partition in partitions}, default


def _gpus(component: Component, partition: Partition) -> int:
    """GPUs of the component's type that a node of the partition has."""
    return partition.gpus.get(component.gpu_type, 0) if component.gpu_type else sum(partition.gpus.values())


def memory_mb(text: str) -> float:
    """MiB of a Slurm memory size such as ``2G``; a number without a unit is MiB."""
    return float(text[:-1]) * _UNITS[text[-1]] if text[-1] in _UNITS else float(text)


def check_fit(config: RunConfig, partitions: Sequence[Partition]) -> None:
    """Raise `UserError` naming field, value and limit when the cluster could never start the job."""
    known, default = _by_name(partitions)
    limit = _time_limit(config)
    used: dict[str, int] = {}
    for name, component, _ in het_groups(config):
        field = f"components.{name}"
        if not component.partition and not default:
            raise invalid(f"{field}.partition", "", "this cluster has no default partition", sorted(known))
        partition = known.get(component.partition or default)
        if partition is None:
            raise invalid(f"{field}.partition", component.partition, "no such partition", sorted(known))
        if partition.state != "up":
            raise invalid(
                f"{field}.partition",
                partition.name,
                f"the partition is {partition.state}",
                sorted(p.name for p in partitions if p.state == "up"),
            )
        _check_node(field, component, partition)
        before = used.get(partition.name, 0)
        used[partition.name] = before + component.nodes
        if used[partition.name] > partition.nodes:
            # Components of one job never share a node.
            others = f" and components before it take {before}" if before else ""
            raise invalid(
                f"{field}.nodes",
                component.nodes,
                f"partition {partition.name} has {partition.nodes} nodes{others}",
                f"at most {partition.nodes - before}",
            )
        if limit is not None and partition.max_seconds is not None and limit > partition.max_seconds:
            raise invalid(
                "slurm.time_limit",
                config.slurm.time_limit,
                f"partition {partition.name} allows {partition.max_seconds // 60} minutes",
                "a shorter time",
            )


def notice_s(slurm: SlurmSection) -> float:
    """Time before the time limit at which Slurm sends its notice.

    Without ``slurm.notice_s`` it is the last resort of a run that stops by itself: `LAST_NOTICE_S`, or a tenth of a
    short time limit.
    """
    if slurm.notice_s:
        return slurm.notice_s
    try:
        limit = slurm_seconds(slurm.time_limit)
    except ValueError:
        limit = None
    return LAST_NOTICE_S if limit is None else min(LAST_NOTICE_S, limit / 10.0)


def _time_limit(config: RunConfig) -> int | None:
    slurm = config.slurm
    try:
        limit = slurm_seconds(slurm.time_limit)
    except ValueError:
        form = "[days-]hours:minutes:seconds"
        raise invalid("slurm.time_limit", slurm.time_limit, "not a Slurm time", form) from None
    if limit is not None and limit <= slurm.notice_s > 0.0:
        why = f"the run begins to save slurm.notice_s = {slurm.notice_s:g} s before it"
        raise invalid("slurm.time_limit", slurm.time_limit, why, "a longer time")
    return limit


def _check_node(field: str, component: Component, partition: Partition) -> None:
    here = f"nodes of partition {partition.name} have"
    if component.cpus > partition.cpus:
        raise invalid(f"{field}.cpus", component.cpus, f"{here} {partition.cpus} CPUs", f"1 to {partition.cpus}")
    if component.mem and memory_mb(component.mem) > partition.memory_mb:
        raise invalid(
            f"{field}.mem", component.mem, f"{here} {partition.memory_mb} MB", f"at most {partition.memory_mb}M"
        )
    if not component.gpus:
        return
    types = sorted(kind for kind in partition.gpus if kind)
    if component.gpu_type and component.gpu_type not in types:
        if not types:
            raise UserError(f"{field}.gpu_type = {component.gpu_type!r}: {here} no typed GPUs; valid: '' (any GPU).")
        raise invalid(f"{field}.gpu_type", component.gpu_type, f"{here} none", types)
    most = _gpus(component, partition)
    if component.gpus > most:
        raise invalid(f"{field}.gpus", component.gpus, f"{here} {most} GPUs", f"0 to {most}" if most else "0")
