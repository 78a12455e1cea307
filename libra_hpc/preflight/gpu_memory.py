"""Whether GPUs of a run file have enough memory, and nodes enough CPUs, by the planner's memory models; the figures.

* Training: a replica's least memory (`libra_hpc.models.memory`) exceeds the GPU -> refused, with the layout that
  `plan` finds.
* Training: a trajectory of ``rollout.max_model_len`` tokens or a full pipeline exceeds the GPU -> warning.
* Rollout: an engine cannot hold its weights and one sequence of ``rollout.max_model_len`` tokens -> refused.
* The GPU is in no table -> warning.
* A node has fewer CPUs than GPUs -> refused.

Host memory: `libra_hpc.preflight.host_memory_needs`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from libra_hpc.config.job import Component
from libra_hpc.config.load import flat
from libra_hpc.config.node_groups import core_world, elastic_world, stages
from libra_hpc.config.rollout import of_node
from libra_hpc.config.run import RunConfig
from libra_hpc.config.run_file_text import toml_value
from libra_hpc.errors import UserError, invalid
from libra_hpc.models.adapters import with_adapters
from libra_hpc.models.devices import MIB, UTIL, Device, blocks_of, device, kv_capacity
from libra_hpc.models.memory import USABLE, TrainMemory, memory_limit, train_memory, world_layout
from libra_hpc.models.shapes import DTYPE_BYTES, ModelShape, model_shape, reference_shape, shape_from_config
from libra_hpc.models.train_seconds import TrainCost, work_of
from libra_hpc.planning.train_layout import TrainSearch, TrainSpace

from .named_files import naming

FP8_CPU_HEADS = 32
"""vLLM 0.32 on CPUs reads FP8 caches for heads of multiples of so many channels, with AVX-512."""
FP8_HEADS = (64, 128, 256, 512)
"""Channels of heads for which FlashInfer reads FP8 caches: in vLLM 0.32 the one backend for GPUs without FP8 units."""


def check_cpus(config: RunConfig) -> None:
    """Raise `UserError` for GPU nodes with too few CPUs; the local executor does not limit them."""
    if config.run.engine == "simulated" or config.slurm.device == "cpu" or config.slurm.executor == "local":
        return
    for name, component in stages(config).items():
        if 0 < component.cpus < component.gpus:
            why = f"a node with {component.gpus} GPUs runs a process for each of them"
            raise invalid(f"components.{name}.cpus", component.cpus, why, f"an integer >= {component.gpus}")


class MemoryNeed(NamedTuple):
    """What the run takes of one kind of memory, and what there is; None: not known."""

    where: str
    """``train GPU``, ``rollout GPU at TP2``, ``train node``"""
    terms: Mapping[str, float]
    has: float | None
    """Bytes that can be used."""

    @property
    def needs(self) -> float:
        return sum(self.terms.values())


class StageGpu(NamedTuple):
    """The GPU of one component, and the model that runs there."""

    stage: str
    component: Component
    gpu: Device
    shape: ModelShape


class GpuMemory(NamedTuple):
    """What the checks of GPU memory found."""

    needs: list[MemoryNeed]
    """Needs of the training GPUs with a full pipeline, and of every kind of engine; none where the GPU is in no
    table."""
    warnings: list[str]
    """A line for each layout that may not fit, or that was not checked."""


def check_memory(config: RunConfig, model: ModelShape | None) -> GpuMemory:
    """Raise `UserError` for a layout that does not fit in GPU memory.

    ``model`` is the shape of the policy with its adapters; None: that of a dry run, whose engines
    `check_simulated` checks.
    """
    simulated = config.run.engine == "simulated"
    needs: list[MemoryNeed] = []
    warnings: dict[str, None] = {}
    if config.slurm.device == "cpu" and not simulated:
        return GpuMemory(needs, [])
    for stage, component in stages(config).items():
        own = stage_gpu(config, stage, model)
        if own is None:
            kind = f"GPUs of gpu_type = {component.gpu_type!r}" if component.gpu_type else "without a gpu_type GPUs"
            warnings[f"{kind} are in no table, so their memory was not checked (planner.device, planner.devices)"] = (
                None
            )
            continue
        if stage != "rollout":
            warnings.update(dict.fromkeys(_check_training(config, own)))
            needs.append(_training_need(config, own))
        if config.rollout_nodes(stage) and not simulated:
            _check_rollout(config, own)
            needs += _engine_needs(config, own)
    return GpuMemory(needs, list(warnings))


def stage_gpu(config: RunConfig, stage: str, model: ModelShape | None) -> StageGpu | None:
    """``model`` as in `check_memory`; None: the GPU is in no table."""
    gpu, rollout = component_device(config, stage), config.rollout
    known = model or with_adapters(model_shape(config.planner.model or config.model.path), *config.lora.arguments)
    shape = known.with_kv(rollout.kv_dtype, rollout.max_model_len, rollout.block_size)
    shape = msgspec.structs.replace(shape, dtype_bytes=DTYPE_BYTES[config.model.dtype])
    return StageGpu(stage, getattr(config.components, stage), gpu, shape) if gpu else None


def component_device(config: RunConfig, component: str) -> Device | None:
    """The GPU of a component's nodes; None when it is in no table.

    Raises `UserError` for an unknown ``planner.device``.
    """
    planner, own = config.planner, getattr(config.components, component).gpu_type
    if config.run.engine == "simulated":
        return device(planner.device or own, planner.devices or None)
    file = Path(planner.devices) if planner.devices else None
    if planner.device:
        with naming(config):
            return device(planner.device, file)
    try:
        return device(own, file)
    except UserError:
        if file is not None and not file.is_file():
            raise invalid(
                "planner.devices", str(file), "no such file", "a TOML file with one table per device"
            ) from None
        return None


def training_memory(config: RunConfig, own: StageGpu, *, pack: int = 0, in_flight: int = 1) -> TrainMemory:
    """Memory of a training GPU with ``in_flight`` micro-batches of ``pack`` tokens; 0: as many as one ever has.

    A hybrid node trains without optimizer state; that of the core is divided over all of its nodes.
    """
    hybrid = own.stage == "hybrid"
    layout = world_layout(config, elastic_world(config) if hybrid else core_world(config), elastic=hybrid)
    return train_memory(
        own.shape,
        layout,
        own.gpu,
        micro_batches=in_flight,
        pack_tokens=pack or fullest_pack(config),
        copies=config.algorithm.minibatches > 1 and config.components.hybrid.nodes > 0,
        reference=reference_shape(config, own.shape),
    )


def fullest_pack(config: RunConfig) -> int:
    """Most tokens of a micro-batch of several trajectories."""
    whole = config.algorithm.prompts_per_step * config.algorithm.group_size * config.rollout.max_model_len
    return min(config.train.micro_tokens, whole)


def longest_pack(config: RunConfig) -> int:
    """Most tokens of a micro-batch: a trajectory beyond ``train.micro_tokens`` is one of its own."""
    return max(fullest_pack(config), config.rollout.max_model_len)


def _training_need(config: RunConfig, own: StageGpu) -> MemoryNeed:
    where = "hybrid GPU that trains" if own.stage == "hybrid" else "train GPU"
    whole = training_memory(config, own, in_flight=config.train.pp, pack=longest_pack(config))
    return MemoryNeed(where, whole.terms(), USABLE * own.gpu.memory_bytes)


def _engine_needs(config: RunConfig, own: StageGpu) -> Iterator[MemoryNeed]:
    given, memory, workspace = config.rollout.kv_cache_mb * MIB, own.gpu.memory_bytes, own.gpu.workspace_bytes
    for tp in _degrees(config, own.stage):
        weights, usable = own.shape.weight_bytes / tp, UTIL * memory
        terms = {"KV cache": float(given) or usable - weights - workspace, "weights": weights, "workspace": workspace}
        yield MemoryNeed(f"{own.stage} GPU at TP{tp}", terms, memory if given else usable)


def _check_training(config: RunConfig, own: StageGpu) -> Iterator[str]:
    """Raise `UserError` when no batch could be trained; yields a warning when the longest one could not."""
    least, gpu = training_memory(config, own), own.gpu
    usable = f"{USABLE * gpu.memory_bytes / 1e9:.0f} GB of one {gpu.name} can be used"
    if memory_limit(least, gpu) is not None:
        layout = f"training {own.shape.name} with {core_world(config).degrees}"
        why = f"{layout} needs {least.total / 1e9:.0f} GB a GPU ({least.largest}) and {usable}"
        raise invalid("train.tp", config.train.tp, why, _layout_that_fits(config, own))
    pack = longest_pack(config)
    longest = training_memory(config, own, in_flight=config.train.pp, pack=pack)
    if memory_limit(longest, gpu) is not None:
        what = f"a pipeline full of micro-batches of {pack:,} tokens"
        yield f"training may run out of GPU memory: {what} needs {longest.total / 1e9:.0f} GB a GPU and {usable}"


def _layout_that_fits(config: RunConfig, own: StageGpu) -> str:
    """What to write instead, in words: what `plan` finds for full micro-batches."""
    values, nodes = fastest_layout(config, own), core_world(config).nodes
    if not values:
        where = f"{nodes} node{'s' * (nodes > 1)} of {own.component.gpus} GPUs"
        return f"more training nodes, a smaller train.micro_tokens or a smaller model: no layout of {where} fits"
    before = flat(config.as_data())
    changed = (
        f"{key} = {toml_value(one)}"
        for key, one in values.items()
        if key in ("train.tp", "train.pp") or one != before[key]
    )
    return f"{', '.join(changed)} (the fastest that fits)"


def fastest_layout(config: RunConfig, own: StageGpu) -> dict[str, Any]:
    """Run-file values of the fastest training layout that fits on the core's GPUs; empty where none does."""
    hybrid, pack, core = config.components.hybrid, fullest_pack(config), core_world(config)
    gpus = config.train.processes or own.component.gpus or core.processes
    batch = config.algorithm.prompts_per_step * config.algorithm.group_size
    reference = reference_shape(config, own.shape)
    work = work_of([(pack, pack)], batch, minibatches=config.algorithm.minibatches, reference=reference)
    search = TrainSearch(TrainCost(own.shape, own.gpu, gpus, work), gpus, TrainSpace(host=config.optimizer.host))
    found = search.best(core.nodes * gpus, elastic=hybrid.nodes_per_replica if hybrid.nodes else 0)
    keys = ("tp", "pp", "cp", "ep", "etp", "micro_tokens", "recompute")
    return {f"train.{key}": getattr(found.layout, key) for key in keys} if found else {}


def _degrees(config: RunConfig, stage: str) -> list[int]:
    """TP degrees of a component's engines."""
    return sorted({of_node(config.rollout.tp, node) for node in config.rollout_nodes(stage)})


def _check_rollout(config: RunConfig, own: StageGpu) -> None:
    """Raise `UserError` when an engine cannot hold its weights and one sequence of full length."""
    rollout, shape, gpu = config.rollout, own.shape, own.gpu
    given, longest = rollout.kv_cache_mb * MIB, f"{rollout.max_model_len:,}"
    tokens = blocks_of(rollout.max_model_len, rollout.block_size) * rollout.block_size

    def missing(tp: int) -> tuple[float, float]:
        """Needed and available bytes of a GPU."""
        weights, sequence = shape.weight_bytes / tp + gpu.workspace_bytes, tokens * shape.kv_bytes_per_device(tp)
        return weights + max(sequence, given), gpu.memory_bytes if given else UTIL * gpu.memory_bytes

    for tp in filter(shape.divides, _degrees(config, own.stage)):
        each = shape.kv_bytes_per_device(tp)
        room = given // each if given else kv_capacity(gpu, shape, tp)
        if tokens > room and given:
            why = f"it holds {room:,} tokens of {shape.name} at TP{tp} and rollout.max_model_len is {longest}"
            valid = f"at least {-(-tokens * each // MIB)}, or 0 (what the GPU has)"
            raise invalid("rollout.kv_cache_mb", rollout.kv_cache_mb, why, valid)
        needs, has = missing(tp)
        if tokens > room or needs > has:
            parts = f"its weights, its workspace and one sequence of {longest} tokens"
            why = f"an engine of {shape.name} needs {needs / 1e9:.0f} GB a GPU for {parts}"
            gpus = own.component.gpus
            larger = [n for n in range(tp + 1, gpus + 1) if shape.divides(n) and missing(n)[0] <= missing(n)[1]]
            fewer = f"a shorter rollout.max_model_len: no TP of the {gpus} GPUs of a node fits"
            valid = f"rollout.tp = {larger[0]}" if larger else fewer
            raise invalid("rollout.tp", tp, f"{why}, and {has / 1e9:.0f} GB of one {gpu.name} can be used", valid)


def cache_type_runs(config: RunConfig, model: Mapping[str, Any]) -> Iterator[UserError]:
    """vLLM has a kernel that reads the KV caches of ``rollout.kv_dtype`` on the run's devices."""
    value = config.rollout.kv_dtype
    if value == "auto":
        return
    head = shape_from_config(dict(model), "model.path").head_dim
    if config.slurm.device == "cpu":
        why = ""
        if head % FP8_CPU_HEADS:
            why = f"vLLM on CPUs needs heads of multiples of {FP8_CPU_HEADS} channels, and the model's have {head}"
        elif config.slurm.executor == "local" and "avx512f" not in Path("/proc/cpuinfo").read_text():
            why = "vLLM on CPUs needs AVX-512, and this machine has none"
        if why:
            yield invalid("rollout.kv_dtype", value, why, ["auto"])
        return
    for name in ("hybrid", "rollout"):
        gpu = component_device(config, name) if config.rollout_nodes(name) else None
        if gpu is not None and not gpu.fp8_units and head not in FP8_HEADS:
            heads = ", ".join(map(str, FP8_HEADS))
            why = f"on {gpu.name} vLLM reads such caches for heads of {heads} channels, and the model's have {head}"
            yield invalid("rollout.kv_dtype", value, why, ["auto"])
