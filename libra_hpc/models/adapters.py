"""Low-rank adapters (arXiv 2106.09685): which weights have them, their tensors, and their counts; needs no torch.

An adapted weight W [out, in] is its base + scale * B A, with A [rank, in] and B [out, rank]. Tensor ranks that share
the rows of W share those of B, and those that share its columns the columns of A; each of them has all of the other.
Where Megatron-Core has one weight for q, k and v, or for gate and up, these have one A.

Targets are projections of attention, of the MLP for every token (dense, or a shared expert), and of routed experts.
Gated delta nets, stacked experts, routers, norms and embeddings have none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TypeVar

import msgspec

from libra_hpc.config.node_groups import Degrees
from libra_hpc.errors import invalid

from .architecture import Architecture, Entry, hf_shapes, stage_entries, stage_layers
from .shapes import Lora, ModelShape
from .supported import in_float32

KINDS = {"qkv.weight": "attention", "proj.weight": "attention", "fc1.weight": "mlp", "fc2.weight": "mlp"}
"""What Megatron-Core's projections belong to, by the ends of their names."""
A, B = ".lora_A.weight", ".lora_B.weight"
"""Ends of the names of tensors, as PEFT has them."""

SOON = 20
"""Steps within which half of the elements should move: so many show whether a run learns. Half: twice the rate."""
HALF = 1 / 360
"""Size of a change, over that of the weight, at which bfloat16 has another number for half of the elements, where both
are normal; for a share of 2 / pi * atan(n) at n times as much. The cosine of made and meant change is then 0.88."""

AnyShape = TypeVar("AnyShape", bound=ModelShape)


def with_adapters(shape: AnyShape, rank: int, alpha: float, targets: Sequence[str]) -> AnyShape:
    """This model with adapters of ``rank``, 0: without; no ``targets``: all that it has.

    Raises `UserError` for a target that the model lacks, and a rank beyond that of every weight.
    """
    if not rank:
        return shape
    if rank > shape.hidden:
        raise invalid("lora.rank", rank, f"{shape.name} has a width of {shape.hidden}", f"1 to {shape.hidden}, or 0")
    has = {
        "attention": shape.attention_layers,
        "mlp": not shape.experts or shape.dense_layers or shape.shared_intermediate,
        "experts": shape.experts and not shape.stacked_experts,
    }
    known = [target for target in has if has[target]]
    if lacks := [target for target in targets if target not in known]:
        raise invalid("lora.targets", lacks[0], f"{shape.name} has no such layers that adapters fit", known)
    return msgspec.structs.replace(shape, lora=Lora(rank=rank, scale=alpha / rank, targets=tuple(targets or known)))


def least_rate(rank: int, alpha: float) -> float:
    """Learning rate from which on half of the elements in bfloat16 move within `SOON` steps of Adam that all agree.

    B then has elements of ``SOON`` rates, and A those it starts with, of 1 / sqrt(3 * inputs). Weights are as large as
    1 / sqrt(inputs).
    """
    return HALF * math.sqrt(3 * rank) / (alpha * SOON)


def adapter_entries(shape: Architecture, entries: Mapping[str, Entry]) -> dict[str, Entry]:
    """Adapters of a rank with these parameters, by Megatron-Core name: an A and a B for each adapted weight.

    The parameters themselves that are trained, where the model has no adapters.
    """
    if shape.lora is None:
        return {name: entry for name, entry in entries.items() if not in_float32(entry.hf[0])}
    out: dict[str, Entry] = {}
    for name, entry in entries.items():
        linear, kind = name.removesuffix(".weight"), KINDS.get(name.rpartition(".linear_")[2])
        if ("experts" if kind == "mlp" and entry.expert is not None else kind) in shape.lora.targets:
            rows, names = entry.layout != "plain", [one.removesuffix(".weight") for one in entry.hf]
            out[f"{linear}.lora_a"] = Entry((f"{names[0]}{A}",), "plain", None if rows else 1, expert=entry.expert)
            out[f"{linear}.lora_b"] = Entry(
                tuple(f"{one}{B}" for one in names), entry.layout, entry.dim if rows else None, expert=entry.expert
            )
    return out


def adapter_shapes(shape: Architecture) -> dict[str, tuple[int, int]]:
    """Sizes of all adapters, by their names in files; none without adapters."""
    entries, rank, sizes = (
        adapter_entries(shape, stage_entries(shape, 1, 0)),
        shape.lora.rank if shape.lora else 0,
        hf_shapes(shape),
    )
    names = [name for entry in entries.values() for name in entry.hf if name.endswith((A, B))]
    found = {name: sizes[f"{name.removesuffix(A).removesuffix(B)}.weight"] for name in names}
    return {name: (rank, size[1]) if name.endswith(A) else (size[0], rank) for name, size in found.items()}


def adapter_params(shape: ModelShape, degrees: Degrees, stage: int) -> tuple[float, float]:
    """Parameters of adapters on one device of a pipeline stage: those of every data-parallel rank, and of experts."""
    lora, both, tp, stages = shape.lora, 2 * shape.hidden, degrees.tp, stage_layers(shape.layers, degrees.pp)
    assert lora is not None
    first, count = sum(stages[:stage]), stages[stage]
    dense = min(max(shape.dense_layers - first, 0), count) if shape.experts else count
    nets = sum(shape.delta_net.layers[first : first + count]) if shape.delta_net else 0
    q, kv, routed = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim, (count - dense) * shape.experts
    shared = (count - dense) * (both + 3 * shape.shared_intermediate / tp) if shape.shared_intermediate else 0.0
    each = {
        "attention": (count - nets) * (both + ((2 + shape.output_gate) * q + 2 * kv) / tp),
        "mlp": dense * (both + 3 * shape.intermediate / tp) + shared,
        "experts": routed / degrees.ep * (both + 3 * shape.moe_intermediate / (degrees.etp or tp)),
    }
    experts = each.pop("experts") * ("experts" in lora.targets)
    return lora.rank * sum(each[one] for one in each if one in lora.targets), lora.rank * experts
