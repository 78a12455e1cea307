"""What sinfo says of a request: the share of a node that it takes, and what no node that is listed could meet.

Slurm is the judge.  A plugin of the site may choose other nodes, so a doubt is a warning; where sbatch refuses without
naming a field, the one doubt that fits its words names it (`libra_hpc.slurm.refusal`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from libra_hpc.config.job import NO_OPTION, Component, SlurmSection
from libra_hpc.config.node_groups import COMPONENTS, PLAIN_CPUS, PLAIN_MEM, het_groups, memory_mb
from libra_hpc.config.run import RunConfig
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
        nodes = [node for node in offered(config, component, partitions) if node.cpus and node.memory_mb]
        cpus, mem = _share(config, component, nodes) if component.gpus else (PLAIN_CPUS, PLAIN_MEM)
        update = {"cpus": component.cpus or cpus, "mem": component.mem or mem}
        filled[name] = msgspec.structs.replace(component, **update)
    return msgspec.structs.replace(config, components=msgspec.structs.replace(config.components, **filled))


def _share(config: RunConfig, component: Component, nodes: Sequence[Partition]) -> tuple[int, str]:
    """CPUs and memory beside a component's GPUs.  Slurm takes any of several kinds of nodes, so they fit each."""
    if not nodes:
        return component.gpus, "0"
    shares = [(node, min(1.0, component.gpus / _gpus(config, component, node))) for node in nodes]
    # All of the memory has a spelling with --mem alone.
    whole = all(share == 1.0 for _, share in shares) and config.slurm.mem_option == "--mem"
    mem = "0" if whole else f"{min(int(node.memory_mb * share) for node, share in shares)}M"
    return min(max(1, int(node.cpus * share)) for node, share in shares), mem


def offered(config: RunConfig, component: Component, partitions: Sequence[Partition]) -> list[Partition]:
    """Return the nodes of `usable` with as many GPUs as the component asks for."""
    return [part for part in usable(component, partitions) if _gpus(config, component, part) >= component.gpus]


def usable(component: Component, partitions: Sequence[Partition]) -> list[Partition]:
    """Return the cluster's partitions that the component names, or the default one."""
    named = component.partition.split(",")
    return [part for part in partitions if (part.name in named if component.partition else part.default)]


def whole_nodes(config: RunConfig) -> bool:
    """Whether GPUs are not asked for, because the site gives nodes as a whole."""
    return config.slurm.gpu_option in ("", NO_OPTION)


def _gpus(config: RunConfig, component: Component, node: Partition) -> int:
    """GPUs of the component's type that a node has."""
    if whole_nodes(config):
        return component.gpus
    return node.gpus.get(component.gpu_type, 0) if component.gpu_type else sum(node.whole_gpus.values())


class Doubt(NamedTuple):
    """A value that no node which sinfo lists could meet: the arguments of `libra_hpc.errors.invalid`."""

    field: str
    value: object
    why: str
    valid: str | tuple[str, ...]


def doubts(config: RunConfig, partitions: Sequence[Partition], *, named: bool = False) -> list[Doubt]:
    """What of the request cannot be met, by sinfo; ``named``: only on partitions that the run file names."""
    found: list[Doubt] = []
    asked = {name: part for name in COMPONENTS if (part := getattr(config.components, name)).nodes}
    if config.components.one_node:
        asked = {group.name: group.component for group in het_groups(config)}
    lists = whole_nodes(config) or any(part.gpus for part in partitions)
    if not lists and any(component.gpus for component in asked.values()):
        why = "no node of this cluster lists GPUs"
        found = [Doubt("slurm.gpu_option", config.slurm.gpu_option, why, "none, where nodes are given whole")]
        config = config.changed(slurm={"gpu_option": NO_OPTION})
    used = dict[str, int]()
    for name, component in asked.items():
        if component.partition or not named:
            found += _doubts(config, name, component, partitions, used)
    return list(dict.fromkeys(found))


def _doubts(
    config: RunConfig, name: str, component: Component, partitions: Sequence[Partition], used: dict[str, int]
) -> list[Doubt]:
    """Doubts of one component; adds its nodes to ``used``."""
    field, known = f"components.{name}", tuple(sorted({part.name for part in partitions}))
    absent = [one for one in component.partition.split(",") if component.partition and one not in known]
    if absent:
        return [Doubt(f"{field}.partition", absent[0], "no such partition", known)]
    # The largest first: of kinds that lack as much, its limits are the ones to name.
    found = sorted(usable(component, partitions), key=lambda part: (-_gpus(config, component, part), -part.cpus))
    takes = [part for part in found if part.state in QUEUES]
    if found and not takes:
        return [_closed(field, found[0], partitions)]
    lacks = [[*_node_doubts(config, name, component, part), *_limit(config.slurm, part)] for part in takes]
    if not takes or all(lacks):
        # Without a default partition a plugin of the site chooses.
        return min(lacks, key=len, default=[])
    return _too_many(field, component.nodes, [part for part, lack in zip(takes, lacks, strict=True) if not lack], used)


def _closed(field: str, closed: Partition, partitions: Sequence[Partition]) -> Doubt:
    valid = tuple(sorted({part.name for part in partitions if part.state in QUEUES}))
    return Doubt(f"{field}.partition", closed.name, f"the partition takes no jobs: {closed.state}", valid)


def _too_many(field: str, nodes: int, able: Sequence[Partition], used: dict[str, int]) -> list[Doubt]:
    """More nodes than the partitions have that are able, less those of ``used``."""
    rooms = dict[str, int]()
    for part in able:
        rooms[part.name] = rooms.get(part.name, 0) + part.nodes
    most = max(rooms, key=lambda partition: rooms[partition] - used.get(partition, 0))
    before = used.get(most, 0)
    if before + nodes > rooms[most]:
        others = f" and components before it take {before}" if before else ""
        why = f"partition {most} has {rooms[most]} such nodes{others}"
        return [Doubt(f"{field}.nodes", nodes, why, f"at most {max(0, rooms[most] - before)}")]
    if len(rooms) == 1:
        # Components of one job never share a node.
        used[most] = before + nodes
    return []


def _node_doubts(config: RunConfig, name: str, component: Component, node: Partition) -> Iterator[Doubt]:
    """What one kind of node lacks; the sums of one node for all agents stand at no key of their own."""
    field, here = f"components.{name}", f"nodes of partition {node.name} have"
    gpus, types = _gpus(config, component, node), tuple(sorted(kind for kind in node.gpus if kind))
    if component.gpus and component.gpu_type and not gpus:
        why = f"{here} {'none' if types else 'no typed GPUs'}"
        yield Doubt(f"{field}.gpu_type", component.gpu_type, why, types or "'' (any GPU)")
        gpus = component.gpus
    limits = (
        ("gpus", component.gpus, component.gpus, gpus, "GPUs", f"0 to {gpus}"),
        ("cpus", component.cpus, component.cpus, node.cpus, "CPUs", f"1 to {node.cpus}"),
        ("mem", component.mem, memory_mb(component.mem or "0"), node.memory_mb, "MB", f"at most {node.memory_mb}M"),
    )
    for key, value, asked, has, unit, valid in limits:
        if asked <= has or (not has and key != "gpus"):
            continue
        if config.components.one_node:
            why = f"its components take {asked:.0f} {unit} together, and {here} {has}"
            yield Doubt("components.one_node", True, why, "false, or components that one node holds")
            return
        yield Doubt(f"{field}.{key}", value, f"{here} {has} {unit}", valid)


def _limit(slurm: SlurmSection, partition: Partition) -> Iterator[Doubt]:
    limit, most = slurm_seconds(slurm.time_limit), partition.max_seconds
    if most is not None and (limit is None or limit > most):
        why = f"partition {partition.name} allows {most // 60} minutes"
        yield Doubt("slurm.time_limit", slurm.time_limit, why, "a shorter time")


def waits(config: RunConfig, partitions: Sequence[Partition]) -> list[str]:
    """A sentence for each partition that has to come back before the job can start."""
    needed, found = dict[str, int](), []
    for group in het_groups(config):
        names = {part.name for part in usable(group.component, partitions)}
        for name in names if len(names) == 1 else ():
            needed[name] = needed.get(name, 0) + group.component.nodes
    for name, count in needed.items():
        kinds = [part for part in partitions if part.name == name]
        nodes, out = sum(part.nodes for part in kinds), sum(part.out for part in kinds)
        if kinds[0].state == "down":
            found.append(f"partition {name} is down; the job waits until it is up")
        elif nodes - out < count <= nodes:
            here = f"{out} of its {nodes} nodes are drained or down"
            found.append(f"partition {name}: {here}; the job waits until {count} are in service")
    return found


def notice_s(slurm: SlurmSection) -> float:
    """Time before the time limit at which Slurm sends its notice.

    Without ``slurm.notice_s`` it is the last resort of a run that stops by itself: `LAST_NOTICE_S`, or a tenth of a
    short time limit.
    """
    if slurm.notice_s:
        return slurm.notice_s
    limit = slurm_seconds(slurm.time_limit)
    return LAST_NOTICE_S if limit is None else min(LAST_NOTICE_S, limit / 10.0)
