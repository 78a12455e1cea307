"""Whether a job can ever start on this cluster: components of the run file against the partitions.

Slurm accepts some impossible requests and leaves the job pending for ever.  For the others it names no field.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from libra_hpc.config.job import Component, SlurmSection
from libra_hpc.config.node_groups import COMPONENTS, PLAIN_CPUS, PLAIN_MEM, het_groups, memory_mb
from libra_hpc.config.run import RunConfig
from libra_hpc.errors import UserError, invalid
from libra_hpc.slurm.queue.query import Partition, slurm_seconds

QUEUES = ("up", "down")
"""States of a partition that takes jobs: those of one that is down wait."""
LAST_NOTICE_S = 120.0
"""Seconds of Slurm's notice to a run that measures its steps and saves.  Half: a slow save may not fit; double: a run
whose step is late loses it earlier."""


def with_resources(config: RunConfig, partitions: Sequence[Partition]) -> RunConfig:
    """``config`` with the CPUs and memory of every component that names none.

    GPUs bring their share of the node; where its partition is not known, a CPU each and all of the node's memory.
    Nodes without GPUs get `PLAIN_CPUS` and `PLAIN_MEM`.
    """
    filled = {}
    for name in COMPONENTS:
        component: Component = getattr(config.components, name)
        cpus, mem = (component.gpus, "0") if component.gpus else (PLAIN_CPUS, PLAIN_MEM)
        allowed = [(part, there) for part in usable(component, partitions) if (there := _gpus(component, part))]
        if component.gpus and allowed:
            shares = [(part, min(1.0, component.gpus / there)) for part, there in allowed]
            # Of several partitions Slurm takes any, so the request fits a node of each.
            cpus = min(max(1, int(part.cpus * share)) for part, share in shares)
            whole = all(share == 1.0 for _, share in shares)
            mem = "0" if whole else f"{min(int(part.memory_mb * share) for part, share in shares)}M"
        update = {"cpus": component.cpus or cpus, "mem": component.mem or mem}
        filled[name] = msgspec.structs.replace(component, **update)
    return msgspec.structs.replace(config, components=msgspec.structs.replace(config.components, **filled))


def usable(component: Component, partitions: Sequence[Partition]) -> list[Partition]:
    """Return the cluster's partitions that the component names, or the default one."""
    named = component.partition.split(",")
    return [part for part in partitions if (part.name in named if component.partition else part.default)]


def _gpus(component: Component, partition: Partition) -> int:
    """GPUs of the component's type that a node of the partition has."""
    return partition.gpus.get(component.gpu_type, 0) if component.gpu_type else sum(partition.gpus.values())


def check_fit(config: RunConfig, partitions: Sequence[Partition]) -> list[str]:
    """Raise `UserError` naming field, value and limit when the cluster could never start the job.

    Returns a sentence for each partition that has to come back first.
    """
    slurm, used = config.slurm, dict[str, int]()
    limit = slurm_seconds(slurm.time_limit)
    if limit is not None and limit <= slurm.notice_s > 0.0:
        why = f"the run begins to save slurm.notice_s = {slurm.notice_s:g} s before it"
        raise invalid("slurm.time_limit", slurm.time_limit, why, "a longer time")
    parts = [(name, part) for name in COMPONENTS if (part := getattr(config.components, name)).nodes]
    if config.components.one_node:
        parts = [(group.name, group.component) for group in het_groups(config)]
    found = {name: _check_component(config, name, component, partitions, used) for name, component in parts}
    if config.borrow.spot.nodes:
        _check_spot(config, partitions)
    # Spare nodes are of the one partition that all components but environments are in.
    own = found["train"]
    if slurm.spare and (spare := max(p.nodes - used.get(p.name, 0) for p in own)) < slurm.spare:
        why = f"partition {own[0].name} has {own[0].nodes} nodes"
        raise invalid("slurm.spare", slurm.spare, why, f"at most {spare}")
    return [why for part in partitions if part.name in used for why in _waits(part, used[part.name])]


def _waits(partition: Partition, needed: int) -> list[str]:
    """What a queued job waits for, in words."""
    if partition.state == "down":
        return [f"partition {partition.name} is down; the job waits until it is up"]
    if needed <= partition.nodes - partition.out:
        return []
    here = f"{partition.out} of its {partition.nodes} nodes are drained or down"
    return [f"partition {partition.name}: {here}; the job waits until {needed} are in service"]


def _check_spot(config: RunConfig, partitions: Sequence[Partition]) -> None:
    """Raise `UserError` for jobs of ``[borrow.spot]`` that no partition could start."""
    spot, own = config.borrow.spot, config.components.rollout
    component = msgspec.structs.replace(own, nodes=1, partition=spot.partition or own.partition)
    found = _partitions("borrow.spot", component, partitions)
    if (most := max(_gpus(component, part) for part in found)) < component.gpus:
        why = f"its nodes have {most} such GPUs, and components.rollout.gpus is {component.gpus}"
        raise invalid("borrow.spot.partition", spot.partition, why, "a partition of such nodes")
    longest = max(found, key=lambda part: part.max_seconds or math.inf)
    _check_limit("borrow.spot", spot.time_limit, longest)


def _partitions(field: str, component: Component, partitions: Sequence[Partition]) -> list[Partition]:
    """Partitions of a component that take jobs; raises `UserError` for one that is not there, and where none does."""
    known = sorted(partition.name for partition in partitions)
    for name in component.partition.split(","):
        if component.partition and name not in known:
            raise invalid(f"{field}.partition", name, "no such partition", known)
    found = usable(component, partitions)
    if not found:
        raise invalid(f"{field}.partition", "", "this cluster has no default partition", known)
    if all(partition.state not in QUEUES for partition in found):
        valid = sorted(p.name for p in partitions if p.state in QUEUES)
        raise invalid(f"{field}.partition", found[0].name, f"the partition takes no jobs: {found[0].state}", valid)
    return [partition for partition in found if partition.state in QUEUES]


def _check_component(
    config: RunConfig, name: str, component: Component, partitions: Sequence[Partition], used: dict[str, int]
) -> list[Partition]:
    """The partitions that Slurm may choose; adds its nodes to ``used``.  Raises `UserError` where it fits none."""
    field = f"components.{name}"
    found, refusals = _partitions(field, component, partitions), []
    for partition in found:
        try:
            _check_node(field, component, partition)
            # Components of one job never share a node.
            _check_size(field, component, partition, used.get(partition.name, 0) if len(found) == 1 else 0)
            _check_limit("slurm", config.slurm.time_limit, partition)
        except UserError as refusal:
            refusals.append(refusal)
    if len(refusals) == len(found):
        raise refusals[0]
    if len(found) == 1:
        used[found[0].name] = used.get(found[0].name, 0) + component.nodes
    return found


def _check_size(field: str, component: Component, partition: Partition, before: int) -> None:
    if before + component.nodes > partition.nodes:
        others = f" and components before it take {before}" if before else ""
        why = f"partition {partition.name} has {partition.nodes} nodes{others}"
        raise invalid(f"{field}.nodes", component.nodes, why, f"at most {partition.nodes - before}")


def _check_limit(section: str, text: str, partition: Partition) -> None:
    limit = slurm_seconds(text)
    if partition.max_seconds is not None and (limit is None or limit > partition.max_seconds):
        why = f"partition {partition.name} allows {partition.max_seconds // 60} minutes"
        raise invalid(f"{section}.time_limit", text, why, "a shorter time")


def notice_s(slurm: SlurmSection) -> float:
    """Time before the time limit at which Slurm sends its notice.

    Without ``slurm.notice_s`` it is the last resort of a run that stops by itself: `LAST_NOTICE_S`, or a tenth of a
    short time limit.
    """
    if slurm.notice_s:
        return slurm.notice_s
    limit = slurm_seconds(slurm.time_limit)
    return LAST_NOTICE_S if limit is None else min(LAST_NOTICE_S, limit / 10.0)


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
