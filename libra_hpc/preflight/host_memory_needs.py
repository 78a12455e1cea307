"""Whether the nodes of a run file have enough host memory and /dev/shm, by `libra_hpc.models.host_memory`.

* On CPUs the memory of trainers and engines is that of their node. ``train.micro_tokens`` is not given -> it is halved
  until the nodes have enough, or the longest trajectory fills a micro-batch. ``rollout.kv_cache_mb`` is not -> the
  caches get what is left, as far as all sequences of an engine fill them.
* A component's nodes get less memory than they need -> refused, with the largest term.
* /dev/shm cannot hold image and offers of weights -> refused. The snapshots -> warning: a run that cannot write them
  goes on without. Of cluster nodes it has ``compute.shm_share`` of their memory.
* Boxes may take more than is left for them -> warning: few take all that they may.
* The size of the nodes is not known -> warning with what they need.

Dry runs are not checked.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from math import ceil, inf
from pathlib import Path
from typing import NamedTuple

import msgspec

from libra_hpc.config.job import Component
from libra_hpc.config.load import flat
from libra_hpc.config.node_groups import PLAIN_MEM, core_world, elastic_world, memory_mb, stages
from libra_hpc.config.run import RunConfig
from libra_hpc.errors import invalid
from libra_hpc.models.devices import CPU, GIB, MIB, UTIL, blocks_of
from libra_hpc.models.host_memory import WEIGHTS, HostRoom, NodeMemory, node_memory, node_work
from libra_hpc.models.memory import MemoryTerms
from libra_hpc.models.shapes import DTYPE_BYTES, ModelShape, reference_shape
from libra_hpc.slurm.fit import offered
from libra_hpc.slurm.queue.query import Partition

from .gpu_memory import MemoryNeed, StageGpu, longest_pack, training_memory

SHM = Path("/dev/shm")


class HostNeed(NamedTuple):
    """What the run takes of one kind of node, and what there is; None: not known."""

    where: str
    """``train node``, ``the node``, ``this machine``"""
    field: str
    """The key of the run file that limits it; empty: none."""
    given: str
    """Its value."""
    parts: tuple[MemoryTerms, ...]
    room: HostRoom
    shm_share: float | None
    """Share of the node's memory that /dev/shm is taken to have; None: it was looked at."""
    less: str = ""
    """The key whose smaller value lessens activations on CPUs; empty: none."""

    @property
    def terms(self) -> dict[str, float]:
        return _summed(part.terms() for part in self.parts)

    @property
    def shared(self) -> dict[str, float]:
        """The terms in /dev/shm."""
        return _summed(part.shared for part in self.parts if isinstance(part, NodeMemory))

    @property
    def needs(self) -> list[MemoryNeed]:
        """Needs of the node and of its /dev/shm."""
        return [
            MemoryNeed(self.where, self.terms, self.room.memory),
            MemoryNeed("  its /dev/shm", self.shared, self.room.shm),
        ]


def host_needs(config: RunConfig, model: ModelShape, partitions: Sequence[Partition] = ()) -> list[HostNeed]:
    """Return the needs of every kind of node; ``config`` has each component's memory filled in where Slurm answered."""
    shape = msgspec.structs.replace(model, dtype_bytes=DTYPE_BYTES[config.model.dtype])
    parts = stages(config)
    nodes = {name: _parts(config, name, shape) for name in parts}
    every = [(part, nodes[name]) for name, part in parts.items() for _ in range(part.nodes)]
    together = tuple(memory for _, memories in every for memory in memories)
    less = _lessening(config)
    if config.slurm.executor == "local":
        return [HostNeed("this machine", "", "", together, HostRoom(_machine(), _size(SHM)), None, less)]
    rooms, share = node_rooms(config, partitions), config.compute.shm_share
    if config.components.one_node:
        train, given = config.components.train, [_given(part) for part, _ in every]
        room = HostRoom(sum(given), rooms["train"].shm) if all(given) else rooms["train"]
        return [HostNeed("the node", "components.train.mem", train.mem, together, room, share, less)]
    return [
        HostNeed(f"{name} node", f"components.{name}.mem", part.mem, nodes[name], rooms[name], share, less)
        for name, part in parts.items()
    ]


def _parts(config: RunConfig, name: str, shape: ModelShape) -> tuple[MemoryTerms, ...]:
    """Memory of one node of a component, and on CPUs that of each of its trainers."""
    rollout, on_node = config.rollout, config.rollout_nodes(name)
    work = node_work(config, name, None if name == "rollout" else reference_shape(config, shape))
    if config.slurm.device == "cuda":
        return (node_memory(shape, work),)
    caches = max(
        (
            engines * tp * max(rollout.kv_cache_mb * MIB, _longest_bytes(config, shape, tp))
            for tp, engines in map(rollout.on_node, on_node)
        ),
        default=0,
    )
    kept = node_memory(shape, msgspec.structs.replace(work, caches=float(caches)))
    if name == "rollout":
        return (kept,)
    own = StageGpu(name, getattr(config.components, name), CPU, shape)
    trainer = training_memory(config, own, in_flight=config.train.pp, pack=longest_pack(config))
    return (kept, *[trainer] * (elastic_world if name == "hybrid" else core_world)(config).processes)


def _longest_bytes(config: RunConfig, shape: ModelShape, tp: int) -> int:
    """KV cache of the longest trajectory on one device."""
    rollout = config.rollout
    cached = shape.with_kv(rollout.kv_dtype, rollout.max_model_len, rollout.block_size)
    return blocks_of(rollout.max_model_len, rollout.block_size) * rollout.block_size * cached.kv_bytes_per_device(tp)


def _lessening(config: RunConfig) -> str:
    """The key whose smaller value lessens the memory of trainers on CPUs."""
    if config.slurm.device == "cuda":
        return ""
    return "train.micro_tokens" if longest_pack(config) > config.rollout.max_model_len else "rollout.max_model_len"


def with_packs(config: RunConfig, model: ModelShape, partitions: Sequence[Partition]) -> RunConfig:
    """``config`` with the longest micro-batches of trainers on CPUs that their nodes' memory holds, where the user gave
    no length."""
    while (
        _lessening(config) == "train.micro_tokens"
        and "train.micro_tokens" not in config.given
        and any(sum(need.terms.values()) > (need.room.memory or inf) for need in host_needs(config, model, partitions))
    ):
        config = config.changed(train={"micro_tokens": config.train.micro_tokens // 2})
    return config


def with_caches(config: RunConfig, model: ModelShape, partitions: Sequence[Partition]) -> RunConfig:
    """``config`` with the KV caches of engines on CPUs that their nodes' memory holds, where the user gave no size."""
    rollout = config.rollout
    if config.slurm.device == "cuda" or rollout.kv_cache_mb:
        return config
    shape = msgspec.structs.replace(model, dtype_bytes=DTYPE_BYTES[config.model.dtype])
    least = max(_longest_bytes(config, shape, rollout.on_node(place)[0]) for place in config.rollout_places)
    found = host_needs(config.changed(rollout={"kv_cache_mb": ceil(least / MIB)}), model, partitions)
    caches = [(need.terms["KV cache"], need) for need in found if "KV cache" in need.terms]
    left = ((UTIL * (need.room.memory or inf) - sum(need.terms.values())) / size for size, need in caches)
    sizes = {"kv_cache_mb": ceil((1 + max(0.0, min(rollout.slots - 1, *left))) * least / MIB)}
    return config.changed(rollout=sizes) if all(need.room.memory for _, need in caches) else config


def fitted(given: RunConfig, config: RunConfig) -> list[str]:
    """What `with_packs` and `with_caches` have changed, in words."""
    was, now = flat(given.as_data()), flat(config.as_data())
    keys = [key for key in ("train.micro_tokens", "rollout.kv_cache_mb") if now[key] != was[key]]
    return [f"{key}: {now[key]:,}, not {was[key]:,}, by the memory of the nodes" for key in keys]


def node_rooms(config: RunConfig, partitions: Sequence[Partition]) -> dict[str, HostRoom]:
    """What the nodes of each component have."""
    found = {}
    for name, part in stages(config).items():
        whole = _smallest(config, part, partitions)
        found[name] = HostRoom(_given(part) or whole, whole and config.compute.shm_share * whole)
    return found


def _machine() -> float:
    """Bytes of this machine."""
    return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def _smallest(config: RunConfig, component: Component, partitions: Sequence[Partition]) -> float | None:
    """Bytes of the smallest node that Slurm may choose; None: not known."""
    return min((p.memory_mb for p in offered(config, component, partitions)), default=0) * float(MIB) or None


def check_boxes(config: RunConfig, needs: Sequence[HostNeed], partitions: Sequence[Partition]) -> list[str]:
    """A warning where the boxes of a node may take more memory than it has for them."""
    limit, env = config.env.limits.memory, config.components.env
    each, boxes = memory_mb(limit) * MIB, config.max_open_groups * config.algorithm.group_size
    where, part, taken = "the rollout leader's node", [*stages(config).values()][-1], 0.0
    if env.nodes:
        boxes, where, part = min(boxes, env.room), "an environment node", env
    whole = _machine() if config.slurm.executor == "local" else _given(part) or _smallest(config, part, partitions)
    if needs and not env.nodes:
        # The last one is the rollout leader's, or the one node's.
        whole, taken = needs[-1].room.memory, sum(needs[-1].terms.values())
    # Without seats the limit counts where the user chose it: the default is far above what most boxes take.
    counts = env.nodes or "env.limits.memory" in config.given
    if whole is None or not counts or boxes * each <= whole - taken:
        return []
    room = max(0.0, whole - taken)
    ways = f"components.env.seats = {max(1, int(room / each))}" if env.nodes else "environment nodes (components.env)"
    may = f"{boxes:,} boxes of {where} may take {_gb(boxes * each)} GB, and it has {_gb(room)} GB for them"
    return [f"env.limits.memory = {limit!r}: {may}; {max(1, int(room / boxes / MIB))}M or {ways} would fit"]


def check_hosts(needs: Sequence[HostNeed]) -> list[str]:
    """Raise `UserError` for nodes with too little memory; returns warnings."""
    warnings = [warning for need in needs if need.room.memory is not None for warning in _check(need, need.room.memory)]
    unknown = [need for need in needs if need.room.memory is None]
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
        enough = total - need.terms.get("activations", 0.0) < memory
        fewer = f", or a smaller {need.less}" if need.less and enough else ""
        fewer += "; train.snapshot_every = 0 takes the snapshots away" if fits else ""
        if not need.field:
            raise invalid("components", "local", why, f"fewer nodes or a smaller model{fewer}")
        raise invalid(need.field, need.given, why, f"at least {ceil(total / GIB)}G{fewer}")
    has = need.room.shm
    if has is None or shared <= has:
        return
    files = sum(need.shared[name] for name in WEIGHTS)
    if files > has:
        what = f"image and offers of weights of {_named(need.where)}"
        why = f"{what} take {_gb(files)} GB of /dev/shm, which has {_gb(has)} GB"
        if need.shm_share is None:
            raise invalid(
                "model.path", "too large", why, "a larger /dev/shm (mount -o remount,size=...), or fewer nodes"
            )
        raise invalid("compute.shm_share", need.shm_share, why, "the share of a node's memory that /dev/shm really has")
    sizes = f"{_gb(shared)} GB ({_largest(need.shared)}) of /dev/shm, which has {_gb(has)} GB"
    assumed = "" if need.shm_share is None else ", by compute.shm_share"
    way = "without snapshots: train.snapshot_every = 0"
    yield f"snapshots do not fit: {_named(need.where)} needs {sizes}{assumed}; {way}"


def _given(component: Component) -> float:
    """Bytes of ``mem``, or of its default; 0: all of the node, or of its share by GPUs."""
    return memory_mb(component.mem or ("0" if component.gpus else PLAIN_MEM)) * MIB


def _size(folder: Path) -> float | None:
    """Bytes of its file system; None where there is no such folder."""
    return float(shutil.disk_usage(folder).total) if folder.is_dir() else None


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
