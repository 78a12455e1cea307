"""Whether a job can ever start on this cluster: components of the run file against the partitions.

Slurm accepts some impossible requests and leaves the job pending for ever.  For the others it names no field.
"""

from __future__ import annotations

from collections.abc import Sequence

from libra_hpc.config.job import Component, SlurmSection
from libra_hpc.config.node_groups import COMPONENTS, PLAIN_CPUS, PLAIN_MEM, het_groups, memory_mb
from libra_hpc.config.run import RunConfig
from libra_hpc.errors import UserError, invalid
from libra_hpc.slurm.queue.query import Partition, slurm_seconds

LAST_NOTICE_S = 120.0
"""Of Slurm's notice to a run that measures its steps and saves.  Half: a slow save may not fit; double: a run whose
step is late loses it earlier."""


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


def check_fit(config: RunConfig, partitions: Sequence[Partition]) -> None:
    """Raise `UserError` naming field, value and limit when the cluster could never start the job."""
    slurm, used = config.slurm, dict[str, int]()
    limit = slurm_seconds(slurm.time_limit)
    if limit is not None and limit <= slurm.notice_s > 0.0:
        why = f"the run begins to save slurm.notice_s = {slurm.notice_s:g} s before it"
        raise invalid("slurm.time_limit", slurm.time_limit, why, "a longer time")
    for name, component, _ in het_groups(config):
        field = f"components.{name}"
        partition = _partition(field, component, partitions)
        _check_node(field, component, partition)
        # Components of one job never share a node.
        before = used.get(partition.name, 0)
        used[partition.name] = before + component.nodes
        if used[partition.name] > partition.nodes:
            others = f" and components before it take {before}" if before else ""
            why = f"partition {partition.name} has {partition.nodes} nodes{others}"
            raise invalid(f"{field}.nodes", component.nodes, why, f"at most {partition.nodes - before}")
        if limit is not None and partition.max_seconds is not None and limit > partition.max_seconds:
            why = f"partition {partition.name} allows {partition.max_seconds // 60} minutes"
            raise invalid("slurm.time_limit", slurm.time_limit, why, "a shorter time")


def _partition(field: str, component: Component, partitions: Sequence[Partition]) -> Partition:
    """The partition of a component; raises `UserError` for one that is not there, or not up."""
    known, default = _by_name(partitions)
    if not component.partition and not default:
        raise invalid(f"{field}.partition", "", "this cluster has no default partition", sorted(known))
    partition = known.get(component.partition or default)
    if partition is None:
        raise invalid(f"{field}.partition", component.partition, "no such partition", sorted(known))
    if partition.state != "up":
        up = sorted(p.name for p in partitions if p.state == "up")
        raise invalid(f"{field}.partition", partition.name, f"the partition is {partition.state}", up)
    return partition


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
