"""Whether the nodes of a run file have enough host memory and /dev/shm, by `libra_hpc.models.host_memory`.

* A component's nodes get less memory than they need -> refused, with the largest term.
* /dev/shm of this machine cannot hold the weight files of a local run -> refused. The snapshots -> warning: a run that
  cannot write them goes on without.
* /dev/shm of cluster nodes is taken as half of their memory, Linux's default: what exceeds it -> warning.
* The size of the nodes is not known -> warning with what they need.

CPU nodes and dry runs are not checked.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from libra_hpc.config.job import Component
from libra_hpc.config.node_groups import memory_mb, stages
from libra_hpc.config.run import RunConfig
from libra_hpc.errors import invalid
from libra_hpc.models.host_memory import NodeMemory, NodeWork, node_memory
from libra_hpc.models.shapes import DTYPE_BYTES, ModelShape
from libra_hpc.slurm.queue.query import Partition

from .gpu_memory import MIB, MemoryNeed

GIB = 1 << 30
SHM = Path("/dev/shm")
SHM_SHARE = 0.5
"""Of a node's memory, where nobody chose another size of /dev/shm."""


class HostNeed(NamedTuple):
    """What the run takes of one kind of node, and what there is; None: not known."""

    where: str
    """``train node``, ``the node``, ``this machine``"""
    field: str
    """The key of the run file that limits it; empty: none."""
    given: str
    """Its value."""
    parts: tuple[NodeMemory, ...]
    memory: float | None
    shm: float | None
    shm_seen: bool
    """Whether /dev/shm was looked at, not assumed."""

    @property
    def terms(self) -> dict[str, float]:
        return _summed(part.terms() for part in self.parts)

    @property
    def shared(self) -> dict[str, float]:
        """The terms in /dev/shm."""
        return _summed(part.shared for part in self.parts)

    @property
    def needs(self) -> list[MemoryNeed]:
        """Of the node and of its /dev/shm."""
        return [MemoryNeed(self.where, self.terms, self.memory), MemoryNeed("  its /dev/shm", self.shared, self.shm)]


def host_needs(config: RunConfig, model: ModelShape, partitions: Sequence[Partition] = ()) -> list[HostNeed]:
    """Of every kind of node; ``config`` has the memory of each component filled in where Slurm answered."""
    if config.run.engine == "simulated" or config.slurm.device == "cpu":
        return []
    shape = msgspec.structs.replace(model, dtype_bytes=DTYPE_BYTES[config.model.dtype])
    parts = stages(config)
    nodes = {name: node_memory(shape, _work(config, name)) for name in parts}
    every = [(part, nodes[name]) for name, part in parts.items() for _ in range(part.nodes)]
    together = tuple(memory for _, memory in every)
    if config.slurm.executor == "local":
        total = float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
        return [HostNeed("this machine", "", "", together, total, _size(SHM), True)]
    if config.components.one_node:
        train = config.components.train
        given, whole = [_given(part) for part, _ in every], _node_bytes(train, partitions)
        limit = sum(given) if all(given) else whole
        return [HostNeed("the node", "components.train.mem", train.mem, together, limit, _half(whole), False)]
    return [_of_component(name, part, nodes[name], partitions) for name, part in parts.items()]


def _of_component(name: str, part: Component, memory: NodeMemory, partitions: Sequence[Partition]) -> HostNeed:
    whole = _node_bytes(part, partitions)
    limit = _given(part) or whole
    return HostNeed(f"{name} node", f"components.{name}.mem", part.mem, (memory,), limit, _half(whole), False)


def check_hosts(needs: Sequence[HostNeed]) -> list[str]:
    """Raise `UserError` for nodes with too little memory; returns warnings."""
    warnings = [warning for need in needs if need.memory is not None for warning in _check(need, need.memory)]
    unknown = [need for need in needs if need.memory is None]
    if unknown:
        most = max(unknown, key=lambda need: sum(need.terms.values()))
        total, shared = sum(most.terms.values()), sum(most.shared.values())
        sizes = f"needs {_gb(total)} GB, {_gb(shared)} GB of it in /dev/shm ({_largest(most.terms)})"
        what = "the size of the nodes is not known, so host memory was not checked"
        warnings.append(f"{what}: {_named(most.where)} {sizes}")
    return warnings


def _check(need: HostNeed, memory: float) -> Iterator[str]:
    total, shared = sum(need.terms.values()), sum(need.shared.values())
    if total > memory:
        sizes = f"needs {_gb(total)} GB of host memory ({_largest(need.terms)}) and has {_gb(memory)} GB"
        why = f"{_named(need.where)} {sizes}"
        fits = total - need.terms.get("snapshots", 0.0) <= memory
        fewer = "; train.snapshot_every = 0 takes the snapshots away" if fits else ""
        if not need.field:
            raise invalid("components", "local", why, f"fewer nodes or a smaller model{fewer}")
        raise invalid(need.field, need.given, why, f"at least {math.ceil(total / GIB)}G{fewer}")
    if need.shm is None or shared <= need.shm:
        return
    files = need.shared["weight files"]
    size = f"{_gb(need.shm)} GB" if need.shm_seen else f"{_gb(need.shm)} GB if it is half of the node's memory"
    if files > need.shm and need.shm_seen:
        why = f"the weight files of {_named(need.where)} take {_gb(files)} GB of /dev/shm, which has {size}"
        raise invalid("model.path", "too large", why, "a larger /dev/shm (mount -o remount,size=...), or fewer nodes")
    what = "weight files do" if files > need.shm else "snapshots do"
    way = "" if files > need.shm else "; without snapshots: train.snapshot_every = 0"
    sizes = f"{_gb(shared)} GB ({_largest(need.shared)})"
    yield f"{what} not fit: {_named(need.where)} needs {sizes} of /dev/shm, which has {size}{way}"


def _work(config: RunConfig, name: str) -> NodeWork:
    component: Component = getattr(config.components, name)
    task = config.task
    environments = 0.0
    # The address space is a limit, far above what most tools take: it counts where the user chose it.
    if name == "rollout" and "tool_memory_mb" in task.model_fields_set:
        environments = float(task.hosts * task.tool_processes * task.tool_memory_mb * MIB)
    return NodeWork(
        rolls=name != "train",
        snapshots=name == "train" and config.train.snapshot_every > 0,
        core_nodes=component.nodes if name == "train" else 0,
        kv_bytes=component.gpus * config.rollout.kv_host_gb_per_gpu * GIB,
        environment_bytes=environments,
    )


def _given(component: Component) -> float:
    """Bytes of ``mem``; 0: none given, or all of the node."""
    return memory_mb(component.mem or "0") * MIB


def _node_bytes(component: Component, partitions: Sequence[Partition]) -> float | None:
    found = next((p for p in partitions if (p.name == component.partition if component.partition else p.default)), None)
    return found.memory_mb * float(MIB) if found is not None and found.memory_mb else None


def _size(folder: Path) -> float | None:
    """Bytes of its file system; None where there is no such folder."""
    return float(shutil.disk_usage(folder).total) if folder.is_dir() else None


def _half(memory: float | None) -> float | None:
    return None if memory is None else SHM_SHARE * memory


def _named(where: str) -> str:
    """In a sentence: every node of a component is alike."""
    return where if where.startswith("th") else f"a {where}"


def _largest(terms: Mapping[str, float]) -> str:
    name, size = max(terms.items(), key=lambda term: term[1])
    return f"{name} {_gb(size)}"


def _gb(size: float) -> str:
    return f"{size / 1e9:,.0f}" if size >= 10e9 else f"{size / 1e9:.1f}"


def _summed(parts: Iterator[Mapping[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for part in parts:
        for name, size in part.items():
            total[name] = total.get(name, 0.0) + size
    return total
