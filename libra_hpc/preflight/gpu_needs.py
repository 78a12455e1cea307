"""What the replicas and engines of a run file take of a GPU: the figures behind `libra_hpc.preflight.resources`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from libra_hpc.config.rollout import of_node
from libra_hpc.config.run import RunConfig
from libra_hpc.models.memory import USABLE
from libra_hpc.models.shapes import DTYPE_BYTES, ModelShape, model_shape
from libra_hpc.simulated.dry_run import pace

from .resources import MIB, UTIL, component_device, fullest_pack, rollout_nodes, training_memory


class GpuNeed(NamedTuple):
    where: str
    """``train GPU in a step``, ``rollout GPU, TP2``"""
    terms: Mapping[str, float]
    has: float
    """Bytes that can be used."""


def gpu_needs(config: RunConfig, model: ModelShape | None) -> list[GpuNeed]:
    """Of the training GPUs with a full pipeline, and of every kind of engine; empty where the GPU is in no table.

    ``model`` is the shape of the policy; a dry run has its own.
    """
    simulated = config.run.engine == "simulated"
    found: list[GpuNeed] = []
    if config.slurm.device == "cpu" and not simulated:
        return found
    for name in ("train", "hybrid", "rollout"):
        gpu = component_device(config, name) if getattr(config.components, name).nodes else None
        if gpu is None:
            continue
        shape = model_shape(pace(config, name).model) if simulated or model is None else model
        shape = msgspec.structs.replace(shape, dtype_bytes=DTYPE_BYTES[config.model.dtype])
        if name != "rollout":
            whole = training_memory(config, shape, gpu, name, pack=fullest_pack(config), in_flight=config.train.pp)
            where = "hybrid GPU that trains" if name == "hybrid" else "train GPU"
            found.append(GpuNeed(where, whole.terms(), USABLE * gpu.memory_bytes))
        if name == "train" or simulated:
            continue
        for tp in sorted({of_node(config.rollout.tp, node) for node in rollout_nodes(config, name)}):
            weights, usable = shape.weight_bytes / tp, UTIL * gpu.memory_bytes
            cache = config.rollout.kv_cache_mb * float(MIB) or usable - weights - gpu.workspace_bytes
            terms = {"KV cache": cache, "weights": weights, "workspace": gpu.workspace_bytes}
            has = gpu.memory_bytes if config.rollout.kv_cache_mb else usable
            found.append(GpuNeed(f"{name} GPU at TP{tp}", terms, has))
    return found
