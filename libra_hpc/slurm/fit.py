"""Whether a job can ever start on this cluster: components of the run file against the partitions.

Slurm accepts some impossible requests and leaves the job pending for ever.  For the others it names no field.
"""

from __future__ import annotations

from collections.abc import Sequence

from libra_hpc.config.job import Component
from libra_hpc.config.run import RunConfig
from libra_hpc.errors import UserError, invalid

from .query import Partition, slurm_seconds

COMPONENTS = ("planner", "train", "hybrid", "rollout")
"""In rank order: MPI ranks count through the components in this order."""
_UNITS = {"K": 1 / 1024, "M": 1.0, "G": 1024.0, "T": 1024.0**2}


def present_components(config: RunConfig) -> list[tuple[str, Component]]:
    """Components that have nodes, in rank order; raises `UserError` unless the first is one planner node."""
    if config.components.planner.nodes != 1:
        raise invalid("components.planner.nodes", config.components.planner.nodes, "rank 0 alone is the planner", "1")
    return [(name, component) for name in COMPONENTS if (component := getattr(config.components, name)).nodes]


def memory_mb(text: str) -> float:
    """MiB of a Slurm memory size such as ``2G``; a number without a unit is MiB."""
    return float(text[:-1]) * _UNITS[text[-1]] if text[-1] in _UNITS else float(text)


def check_fit(config: RunConfig, partitions: Sequence[Partition]) -> None:
    """Raise `UserError` naming field, value and limit when the cluster could never start the job."""
    known = {partition.name: partition for partition in partitions}
    default = next((partition.name for partition in partitions if partition.default), "")
    limit = _time_limit(config)
    used: dict[str, int] = {}
    for name, component in present_components(config):
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


def _time_limit(config: RunConfig) -> int | None:
    try:
        return slurm_seconds(config.slurm.time_limit)
    except ValueError:
        raise invalid(
            "slurm.time_limit", config.slurm.time_limit, "not a Slurm time", "[days-]hours:minutes:seconds"
        ) from None


def _check_node(field: str, component: Component, partition: Partition) -> None:
    here = f"nodes of partition {partition.name} have"
    if component.cpus > partition.cpus:
        raise invalid(f"{field}.cpus", component.cpus, f"{here} {partition.cpus} CPUs", f"1 to {partition.cpus}")
    if memory_mb(component.mem) > partition.memory_mb:
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
    most = partition.gpus[component.gpu_type] if component.gpu_type else sum(partition.gpus.values())
    if component.gpus > most:
        raise invalid(f"{field}.gpus", component.gpus, f"{here} {most} GPUs", f"0 to {most}")
