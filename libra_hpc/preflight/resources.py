"""Whether nodes and GPUs of a run file have enough memory and CPUs for its engines, by the planner's memory models.

* Training: a replica's least memory (`libra_hpc.cost_models.memory`) exceeds the GPU -> refused, with the smallest
  TP x PP that fits.
* Training: a trajectory of ``rollout.max_model_len`` tokens, or a full pipeline, exceeds the GPU -> warning.
* Rollout: an engine cannot hold its weights and one sequence of ``rollout.max_model_len`` tokens -> refused.
* The GPU is in no table -> warning.
* A node has fewer CPUs than GPUs, or too little memory for the policy's weights and processes -> refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import msgspec

from libra_hpc.config.job import Component
from libra_hpc.config.rollout import of_node
from libra_hpc.config.run import RunConfig
from libra_hpc.cost_models.memory import (
    RECOMPUTE,
    USABLE,
    Recompute,
    TrainLayout,
    TrainMemory,
    memory_limit,
    train_memory,
)
from libra_hpc.errors import UserError, invalid
from libra_hpc.hardware.capacity import blocks_of, kv_capacity
from libra_hpc.hardware.devices import Device, device
from libra_hpc.hardware.models import DTYPE_BYTES, ModelShape, model_shape
from libra_hpc.simulated.dry_run import pace
from libra_hpc.slurm.fit import memory_mb

from .field_names import naming

MIB, GIB = 1 << 20, 1 << 30
HOST_BYTES = 2
"""Bytes of a weight in /dev/shm, where engines read every version; it counts as the job's memory."""
NODE_BYTES = 4e9
"""Least memory of a node's agent, engine processes and libraries, in bytes: below it a node certainly fails."""
UTIL = 0.9
"""Share of a GPU that an engine takes: vLLM's default."""


def check_nodes(config: RunConfig, model: ModelShape) -> None:
    """Raise `UserError` for GPU nodes with too few CPUs or too little memory for ``model``.

    The local executor limits neither, so it is not checked.
    """
    if config.run.engine == "simulated" or config.slurm.device == "cpu" or config.slurm.executor == "local":
        return
    weights = model.params * HOST_BYTES
    for name in ("train", "hybrid", "rollout"):
        component: Component = getattr(config.components, name)
        if not component.nodes:
            continue
        if 0 < component.cpus < component.gpus:
            why = f"a node with {component.gpus} GPUs runs a process for each of them"
            raise invalid(f"components.{name}.cpus", component.cpus, why, f"an integer >= {component.gpus}")
        # Slurm takes 0 for all memory of a node.
        memory = memory_mb(component.mem or "0") * MIB
        caches = component.gpus * config.rollout.kv_host_gb_per_gpu * GIB if name != "train" else 0.0
        needs = weights + NODE_BYTES + caches
        if 0 < memory < needs:
            why = (
                f"the weights of {model.name} take {weights / 1e9:.1f} GB of a node's memory in bfloat16, the processes"
                f" around them {NODE_BYTES / 1e9:.0f} GB"
            )
            if caches:
                why += f", rollout.kv_host_gb_per_gpu on {component.gpus} GPUs {caches / 1e9:.1f} GB"
            raise invalid(f"components.{name}.mem", component.mem, why, f"at least {math.ceil(needs / GIB)}G")


def check_memory(config: RunConfig, model: ModelShape | None) -> list[str]:
    """Raise `UserError` for a layout that does not fit in GPU memory.

    Returns a warning for each that may not fit, or that was not checked.  ``model`` is the shape of the policy.  A dry
    run uses that of ``[simulated]``, and `check_simulated` checks its engines.
    """
    simulated = config.run.engine == "simulated"
    if config.slurm.device == "cpu" and not simulated:
        return []
    warnings: dict[str, None] = {}
    for name in ("train", "hybrid", "rollout"):
        component: Component = getattr(config.components, name)
        if not component.nodes:
            continue
        found = _device(config, name)
        if found is None:
            kind = (
                f"GPUs of gpu_type = {component.gpu_type!r} are"
                if component.gpu_type
                else "without a gpu_type GPUs are"
            )
            warnings[f"{kind} in no table, so their memory was not checked (planner.device, planner.devices)"] = None
            continue
        shape = model_shape(pace(config, name).model) if simulated or model is None else model
        shape = msgspec.structs.replace(shape, dtype_bytes=DTYPE_BYTES[config.model.dtype])
        if name != "rollout":
            warnings.update(dict.fromkeys(_check_training(config, shape, found, component.gpus)))
        if name != "train" and not simulated:
            _check_rollout(config, name, shape, found, gpus=component.gpus)
    return list(warnings)


def _device(config: RunConfig, component: str) -> Device | None:
    """The GPU of a component's nodes; None when it is in no table.

    Raises `UserError` for an unknown ``planner.device``.
    """
    planner = config.planner
    if config.run.engine == "simulated":
        simulated = pace(config, component)
        return device(simulated.device, simulated.devices or None)
    file = Path(planner.devices) if planner.devices else None
    if planner.device:
        with naming(config):
            return device(planner.device, file)
    try:
        return device(getattr(config.components, component).gpu_type, file)
    except UserError:
        if file is not None and not file.is_file():
            raise invalid(
                "planner.devices", str(file), "no such file", "a TOML file with one table per device"
            ) from None
        return None


def _check_training(config: RunConfig, shape: ModelShape, gpu: Device, gpus: int) -> Iterator[str]:
    """Raise `UserError` when no batch could be trained; yields a warning when the longest one could not."""
    train = config.train
    whole = config.algorithm.prompts_per_step * config.algorithm.group_size * config.rollout.max_model_len
    tokens = min(train.micro_tokens, whole)

    def memory(tp: int, pp: int, recompute: Recompute, in_flight: int = 1, pack: int = tokens) -> TrainMemory:
        layout = TrainLayout(tp=tp, pp=pp, cp=1, ep=1, dp=1, micro_tokens=train.micro_tokens, recompute=recompute)
        return train_memory(shape, layout, gpu, micro_batches=in_flight, pack_tokens=pack)

    least = memory(train.tp, train.pp, train.recompute)
    usable = f"{USABLE * gpu.memory_bytes / 1e9:.0f} GB of one {gpu.name} can be used"
    if memory_limit(least, gpu) is not None:
        term, size = max(least.terms().items(), key=lambda item: item[1])
        layout = f"training {shape.name} with TP{train.tp} PP{train.pp}"
        why = f"{layout} needs {least.total / 1e9:.0f} GB a GPU ({term} {size / 1e9:.0f}) and {usable}"
        for recompute in dict.fromkeys((train.recompute, *RECOMPUTE[1:])):
            for tp, pp in _splits(shape, gpus):
                if memory_limit(memory(tp, pp, recompute), gpu) is None:
                    more = "" if recompute == train.recompute else f' and train.recompute = "{recompute}"'
                    raise invalid(
                        "train.tp", train.tp, why, f"train.tp = {tp}, train.pp = {pp}{more} (the fewest GPUs)"
                    )
        raise invalid(
            "train.tp",
            train.tp,
            why,
            f"a smaller train.micro_tokens or a smaller model: no TP x PP of the {gpus} GPUs of a node fits",
        )
    pack = max(tokens, config.rollout.max_model_len)
    longest = memory(train.tp, train.pp, train.recompute, in_flight=train.pp, pack=pack)
    if memory_limit(longest, gpu) is not None:
        what = f"a pipeline full of micro-batches of {pack:,} tokens"
        yield f"training may run out of GPU memory: {what} needs {longest.total / 1e9:.0f} GB a GPU and {usable}"


def _splits(shape: ModelShape, gpus: int) -> list[tuple[int, int]]:
    """(TP, PP) that divide the model and fit on a node, the fewest GPUs first."""
    degrees = range(1, gpus + 1)
    found = [
        (tp, pp) for tp in degrees for pp in degrees if tp * pp <= gpus and not shape.layers % pp and shape.trains(tp)
    ]
    return sorted(found, key=lambda split: (split[0] * split[1], split[1]))


def _check_rollout(config: RunConfig, component: str, shape: ModelShape, gpu: Device, *, gpus: int) -> None:
    """Raise `UserError` when an engine cannot hold its weights and one sequence of full length."""
    rollout, hybrid = config.rollout, config.components.hybrid.nodes
    nodes = range(hybrid) if component == "hybrid" else range(hybrid, hybrid + config.components.rollout.nodes)
    tokens = blocks_of(rollout.max_model_len, rollout.block_size) * rollout.block_size

    def missing(tp: int) -> tuple[float, float]:
        """Needed and available bytes of a GPU."""
        weights, sequence = shape.weight_bytes / tp + gpu.workspace_bytes, tokens * shape.kv_bytes_per_device(tp)
        if rollout.kv_cache_mb:
            return weights + max(sequence, rollout.kv_cache_mb * MIB), gpu.memory_bytes
        return weights + sequence, UTIL * gpu.memory_bytes

    for tp in sorted({of_node(rollout.tp, node) for node in nodes}):
        if not shape.divides(tp):
            continue
        room = (
            rollout.kv_cache_mb * MIB // shape.kv_bytes_per_device(tp)
            if rollout.kv_cache_mb
            else kv_capacity(gpu, shape, tp, UTIL)
        )
        needs, has = missing(tp)
        if tokens > room and rollout.kv_cache_mb:
            least = -(-tokens * shape.kv_bytes_per_device(tp) // MIB)
            longest = f"rollout.max_model_len is {rollout.max_model_len:,}"
            why = f"it holds {room:,} tokens of {shape.name} at TP{tp} and {longest}"
            raise invalid("rollout.kv_cache_mb", rollout.kv_cache_mb, why, f"at least {least}, or 0 (what the GPU has)")
        if tokens > room or needs > has:
            why = (
                f"an engine of {shape.name} needs {needs / 1e9:.0f} GB a GPU for its weights, its workspace and one "
                "sequence of "
                f"{rollout.max_model_len:,} tokens, and {has / 1e9:.0f} GB of one {gpu.name} can be used"
            )
            larger = next(
                (n for n in range(tp + 1, gpus + 1) if shape.divides(n) and missing(n)[0] <= missing(n)[1]), None
            )
            valid = (
                f"rollout.tp = {larger}"
                if larger
                else f"a shorter rollout.max_model_len: no TP of the {gpus} GPUs of a node fits"
            )
            raise invalid("rollout.tp", tp, why, valid)
