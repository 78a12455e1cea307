"""Adapters of a checkpoint as PEFT has them: ``adapter_config.json`` and ``adapter_model.safetensors``, float32.

Added to the model with which the run began, they give the checkpoint's policy. Where Megatron-Core has one A for
several weights, each of them gets a copy.

Routed experts are two parameters in transformers, gate and up side by side and down. PEFT has one A [experts * rank,
in] and one B [out, rank * experts] for each, and wraps their module twice.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import torch

from libra_hpc.models.adapters import B
from libra_hpc.models.architecture import Architecture
from libra_hpc.weights.names import ReplicaPlace, trained_entries
from libra_hpc.weights.safetensors_writer import write_safetensors

from .shard_files import ShardFiles

PREFIX = "base_model.model."
"""PEFT's name of the model inside its own."""
EXPERTS = {"gate_up_proj": "experts.base_layer", "down_proj": "experts"}
"""Parameters of routed experts, and the modules of their adapters."""


def write_peft(checkpoint: Path, shape: Architecture, model: str, out: Path) -> int:
    """Make the folder ``out`` from a checkpoint of a run that began with ``model``; returns the count of adapters.

    Raises `OSError` where it exists, or there is no room.
    """
    assert shape.lora is not None
    pairs = read_adapters(checkpoint, shape)
    # The name without its layer: all layers of a kind have adapters.
    linears = {name.split(".", 3)[3] for name in pairs}
    routed = {one for one in linears if one.endswith(tuple(EXPERTS.values()))}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": model,
        "inference_mode": True,
        "r": shape.lora.rank,
        "lora_alpha": shape.lora.rank * shape.lora.scale,
        "target_modules": sorted(linears - routed),
        "target_parameters": [f"mlp.experts.{name}" for name in EXPERTS] if routed else None,
    }
    tensors = {
        f"{PREFIX}{name}.lora_{one}.weight": tensor
        for name, pair in pairs.items()
        for one, tensor in zip("AB", pair, strict=True)
    }
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    out.mkdir(parents=True)
    write_safetensors(out / "adapter_model.safetensors", torch.float32, shapes, tensors.items())
    (out / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    return len(pairs)


def read_adapters(checkpoint: Path, shape: Architecture) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """A and B by the name of their module in transformers."""
    found: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = defaultdict(list)
    with ShardFiles(checkpoint, shape) as files:
        for name, entry in trained_entries(shape, ReplicaPlace(1, 0, 1, 0)).items():
            parts = files.whole("master", entry)
            if name.endswith(".lora_a"):
                low = parts[0]
            elif entry.expert is None:
                found.update({one.removesuffix(B): [(low, up)] for one, up in zip(entry.hf, parts, strict=True)})
            else:
                kind = EXPERTS["gate_up_proj" if ".linear_fc1." in name else "down_proj"]
                found[f"{entry.hf[0].partition('.experts.')[0]}.{kind}"].append((low, torch.cat(parts)))
    return {
        name: (torch.cat([a for a, _ in own]), torch.stack([b for _, b in own], dim=-1).flatten(1))
        for name, own in found.items()
    }
