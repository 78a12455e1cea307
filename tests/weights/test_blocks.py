"""The map from a trainer's shards to an engine's parameters, for the product of layouts and all families; no processes.

What is moved are numbers of elements, so that any wrong place shows.  The trainer's side is checked by real models of
Megatron-Core, which load by it; the engine's against a plain description of vLLM's parameters.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from functools import reduce
from typing import Any

import msgspec
import pytest
import torch

from libra_hpc.models.architecture import Architecture, hf_shapes
from libra_hpc.models.architecture import architecture as read
from libra_hpc.models.shapes import DeltaNet
from libra_hpc.models.supported import TRAINED
from libra_hpc.weights.blocks import Slice, engine_slices, from_hf, own_slices, within
from libra_hpc.weights.names import ReplicaPlace, own_entries
from libra_hpc.weights.pieces import TensorBlock

WORLDS = [
    ReplicaPlace(tp=tp, tp_rank=0, pp=pp, pp_rank=0, dp=dp, ep=ep, etp=etp)
    for tp, pp, dp, ep, etp in itertools.product((1, 2, 4), (1, 2, 3), (1, 2, 4), (1, 2, 4), (1, 2, 4))
    if tp * dp % (ep * etp) == 0
]


def architecture(family: str, tied: bool, **keys: Any) -> Architecture:
    sizes = {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 68}
    sizes |= {"hidden_size": 12, "head_dim": 6, "intermediate_size": 16, "max_position_embeddings": 64}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    experts |= {"shared_expert_intermediate_size": 20, "linear_num_key_heads": 4, "linear_num_value_heads": 8}
    experts |= {"linear_key_head_dim": 2, "linear_value_head_dim": 3, "full_attention_interval": 2}
    shape = read({"model_type": family, "tie_word_embeddings": tied, **sizes, **experts})
    return msgspec.structs.replace(shape, **keys)


KINDS = sorted(
    {
        tuple(hf_shapes(architecture(family, tied)).items()): (family, tied)
        for family in TRAINED
        for tied in ((True, False) if family in ("qwen3", "qwen3_moe") else (False,))
    }.values()
)
"""One family of those with the same tensors; a tied embedding is the same thing in all."""


MANY = ("glm4_moe", "olmoe", "qwen2_moe", "qwen3_next")
"""Families whose layouts of experts are tried at night: they take long, and routed ones are alike in all."""


def worlds(shape: Architecture) -> list[ReplicaPlace]:
    """Layouts of its experts."""
    found = [one for one in WORLDS if shape.experts or one.ep == one.etp == 1]
    return [one for one in found if one.etp == 1 or not shape.stacked_experts]


def numbered(shape: Architecture) -> dict[str, torch.Tensor]:
    """Every element has a number of its own."""
    out, at = {}, 1
    for name, size in hf_shapes(shape).items():
        out[name] = torch.arange(at, at + math.prod(size)).reshape(size)
        at += math.prod(size)
    return out


def view(flat: torch.Tensor, block: TensorBlock) -> torch.Tensor:
    return flat.as_strided((block.rows, block.cols), (block.stride, 1), block.offset)


def moved(one: Slice, source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy a slice of a Hugging Face tensor to its place."""
    there = target.as_strided((one.block.rows, one.block.cols), (one.stride, 1), one.offset)
    there.copy_(view(source.reshape(-1), one.block))


def ranks(world: ReplicaPlace) -> Iterator[ReplicaPlace]:
    for pp, dp, tp in itertools.product(range(world.pp), range(world.dp), range(world.tp)):
        yield world._replace(pp_rank=pp, dp_rank=dp, tp_rank=tp)


@pytest.mark.parametrize(
    ("family", "tied"), [pytest.param(*kind, marks=[pytest.mark.nightly] * (kind[0] in MANY)) for kind in KINDS]
)
def test_every_element_is_offered_once_whatever_the_layout(family: str, tied: bool) -> None:
    """Cut by the optimizer as well, at places that no row or head respects."""
    shape = architecture(family, tied)
    sizes = hf_shapes(shape)
    for world in worlds(shape):
        count = {name: torch.zeros(math.prod(size), dtype=torch.int8) for name, size in sizes.items()}
        for rank in ranks(world):
            entries = own_entries(shape, rank)
            for name, slices in own_slices(shape, rank).items():
                dense = entries[name].expert is None
                writers, writer = (
                    (rank.copies, rank.copy_rank) if dense else (rank.expert_copies, rank.expert_copy_rank)
                )
                size = sum(one.block.rows * one.block.cols for one in slices)
                own = within(slices, size * writer // writers, size * (writer + 1) // writers)
                for one in own:
                    view(count[one.block.tensor], one.block).add_(1)
        assert all((tensor == 1).all() for tensor in count.values()), world


def test_the_parts_of_a_shard_lie_where_they_say() -> None:
    """Every begin and end of a parameter that has a column cut, and of one that has rows of several heads."""
    shape = architecture("qwen3", False)
    whole = numbered(shape)
    place = ReplicaPlace(tp=4, tp_rank=1, pp=1, pp_rank=0)
    entries = own_entries(shape, place)
    for name in ("linear_proj", "linear_qkv"):
        name = f"decoder.layers.1.self_attention.{name}.weight"
        slices = own_slices(shape, place)[name]
        want = from_hf(entries[name], whole.__getitem__, shape, place).reshape(-1)
        for begin, end in itertools.combinations(range(len(want) + 1), 2):
            parts = within(slices, begin, end)
            at = 0
            for one in parts:
                assert (one.offset, one.stride) == (at, one.block.cols)
                values = view(whole[one.block.tensor].reshape(-1), one.block).reshape(-1)
                assert torch.equal(values, want[begin + at :][: len(values)])
                at += len(values)
            assert at == end - begin
            if len(slices) == 1:
                assert len(parts) <= 3


def engine_net(net: DeltaNet, own: dict[str, torch.Tensor], prefix: str, part: Any) -> dict[str, Any]:
    """vLLM's parameters of a gated delta net: the parts of a projection are cut each, then concatenated."""
    mixed = [net.keys, net.keys, net.values]
    out = {x: part(own[x], 0) for x in ("A_log", "dt_bias")}
    out["conv1d.weight"] = torch.cat([part(x, 0) for x in own["conv1d.weight"].split(mixed)])
    out["out_proj.weight"] = part(own["out_proj.weight"], 1)
    if net.fused:
        out |= {f"{x}.weight": part(own[f"{x}.weight"], 0) for x in net.projections}
    else:
        parts = [*own["in_proj_qkv.weight"].split(mixed), own["in_proj_z.weight"]]
        out["in_proj_qkvz.weight"] = torch.cat([part(x, 0) for x in parts])
        out["in_proj_ba.weight"] = torch.cat([part(own[f"in_proj_{x}.weight"], 0) for x in "ba"])
    return {f"{prefix}linear_attn.{name}": tensor for name, tensor in out.items()}


def engine_parameters(shape: Architecture, whole: dict[str, torch.Tensor], tp: int, rank: int) -> dict[str, Any]:
    """vLLM's parameters of a rank, by its own rules: shard, then concatenate; heads replicated; vocabulary padded."""
    out: dict[str, Any] = {}

    def part(tensor: torch.Tensor, dim: int) -> torch.Tensor:
        return tensor.chunk(tp, dim)[rank]

    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}."
        net = shape.delta_net if shape.delta_net and shape.delta_net.layers[layer] else None
        if net:
            out |= engine_net(
                net, {x: whole[f"{prefix}linear_attn.{x}"] for x in net.sizes(shape.hidden)}, prefix, part
            )
        for kind in () if net else ("weight", "bias") if shape.qkv_bias else ("weight",):
            if shape.kind.fused_qkv:
                q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
                parts = list(whole[f"{prefix}self_attn.qkv_proj.{kind}"].split([q, kv, kv]))
            else:
                parts = [whole[f"{prefix}self_attn.{x}_proj.{kind}"] for x in "qkv"]
            of_groups = min(tp, shape.kv_heads)
            keys = [x.chunk(of_groups)[rank * of_groups // tp] for x in parts[1:]]
            out[f"{prefix}self_attn.qkv_proj.{kind}"] = torch.cat([part(parts[0], 0), *keys])
        if not net:
            out[f"{prefix}self_attn.o_proj.weight"] = part(whole[f"{prefix}self_attn.o_proj.weight"], 1)
        mlp = f"{prefix}mlp."
        if shape.stacked_experts:
            # As they are before the engine transposes them.
            experts, held = f"{mlp}experts.routed_experts.", f"{mlp}experts."
            out[f"{experts}w13_weight"] = part(whole[f"{held}gate_up_proj"], 2)
            out[f"{experts}w13_bias"] = part(whole[f"{held}gate_up_proj_bias"], 1)
            out[f"{experts}w2_weight"] = part(whole[f"{held}down_proj"], 1)
            out |= {} if rank else {f"{experts}w2_bias": whole[f"{held}down_proj_bias"]}
            out[f"{prefix}self_attn.sinks"] = part(whole[f"{prefix}self_attn.sinks"], 0)
        elif shape.experts and layer >= shape.dense_layers:
            each = [f"{mlp}experts.{expert}." for expert in range(shape.experts)]
            gated = [torch.cat([part(whole[f"{name}{x}_proj.weight"], 0) for x in ("gate", "up")]) for name in each]
            if shared := shape.kind.shared_expert:
                halves = [part(whole[f"{mlp}{shared}.{x}_proj.weight"], 0) for x in ("gate", "up")]
                out[f"{mlp}{shared}.gate_up_proj.weight"] = torch.cat(halves)
                out[f"{mlp}{shared}.down_proj.weight"] = part(whole[f"{mlp}{shared}.down_proj.weight"], 1)
            out[f"{mlp}experts.routed_experts.w13_weight"] = torch.stack(gated)
            out[f"{mlp}experts.routed_experts.w2_weight"] = torch.stack(
                [part(whole[f"{name}down_proj.weight"], 1) for name in each]
            )
        else:
            if shape.kind.fused_mlp:
                halves = list(whole[f"{mlp}gate_up_proj.weight"].chunk(2))
            else:
                halves = [whole[f"{mlp}{x}_proj.weight"] for x in ("gate", "up")]
            out[f"{mlp}gate_up_proj.weight"] = torch.cat([part(x, 0) for x in halves])
            out[f"{mlp}down_proj.weight"] = part(whole[f"{mlp}down_proj.weight"], 1)
    for name in whole:
        if "norm" in name or name.endswith(
            ("gate.weight", "correction_bias", "router.weight", "router.bias", "o_proj.bias")
        ):
            out[name] = whole[name]
        elif name in ("model.embed_tokens.weight", "lm_head.weight"):
            padded = torch.zeros(128, shape.hidden, dtype=torch.long)
            padded[: shape.vocab] = whole[name]
            out[name] = part(padded, 0)
    if shape.stacked_experts:
        renamed = ((".self_attn.", ".attn."), ("embed_tokens", "embedding"))
        out = {reduce(lambda to, pair: to.replace(*pair), renamed, name): tensor for name, tensor in out.items()}
    return out


@pytest.mark.parametrize(("family", "tied"), KINDS)
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_an_engine_gets_its_parameters(family: str, tied: bool, tp: int) -> None:
    shape = architecture(family, tied)
    whole = numbered(shape)
    for rank in range(tp):
        want = engine_parameters(shape, whole, tp, rank)
        found = {name: torch.zeros_like(tensor).reshape(-1) for name, tensor in want.items()}
        for tensor, slices in engine_slices(shape, tp, rank).items():
            for one in slices:
                assert one.block.tensor == tensor
                moved(one, whole[tensor], found[one.parameter])
        for name, tensor in want.items():
            assert torch.equal(found[name].reshape(tensor.shape), tensor), name
