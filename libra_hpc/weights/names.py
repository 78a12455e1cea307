"""Parameter names and layouts of Megatron-Core <-> Hugging Face, for any tensor- and pipeline-parallel split.

It holds for any tensor of a parameter's shape: weights, gradients, Adam moments.  Two layouts differ:

- ``linear_qkv`` interleaves per query group: its q heads, its k head, its v head.  Ranks have equal shares of these
  rows, so with fewer groups than ranks a cut may go through a head.
- ``linear_fc1`` holds gate and up halves *per tensor-parallel rank*.

Some families store q, k and v, or gate and up, as one Hugging Face tensor (`libra_hpc.hardware.supported.Family`).

A pipeline stage numbers its layers from 0.  Ranks of a world count tensor ranks fastest, then context, data, stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist

from libra_hpc.hardware.architecture import Architecture, stage_layers


class ReplicaPlace(NamedTuple):
    tp: int
    tp_rank: int
    pp: int
    pp_rank: int
    tp_group: dist.ProcessGroup | None = None
    """Needed to gather when ``tp`` > 1."""
    cp: int = 1
    cp_rank: int = 0
    dp: int = 1
    dp_rank: int = 0

    @property
    def gathers(self) -> bool:
        """Whether this process takes part in `gathered`: one data-parallel copy does."""
        return not self.dp_rank and not self.cp_rank

    @property
    def stage_stride(self) -> int:
        """Processes of one pipeline stage."""
        return self.tp * self.cp * self.dp


class Entry(NamedTuple):
    """How one Megatron-Core parameter maps to Hugging Face tensors."""

    hf: tuple[str, ...]
    """One name for each part of the layout, or one for all of them in a row."""
    layout: Literal["plain", "qkv", "gated"]
    dim: int | None
    """Dimension cut over tensor-parallel ranks; None: replicated."""
    copy: bool = False
    """The last stage's copy of a tied embedding: loaded, never saved."""


def stage_entries(shape: Architecture, pp: int, pp_rank: int) -> dict[str, Entry]:
    """Parameters of one pipeline stage, by Megatron-Core name, in a fixed order."""
    out: dict[str, Entry] = {}
    if pp_rank == 0:
        out["embedding.word_embeddings.weight"] = Entry(("model.embed_tokens.weight",), "plain", 0)
    stages = stage_layers(shape.layers, pp)
    first = sum(stages[:pp_rank])
    for local in range(stages[pp_rank]):
        out.update(_layer(shape, f"decoder.layers.{local}.", f"model.layers.{first + local}."))
    if pp_rank == pp - 1:
        out["decoder.final_layernorm.weight"] = Entry(("model.norm.weight",), "plain", None)
        if not shape.tied:
            out["output_layer.weight"] = Entry(("lm_head.weight",), "plain", 0)
        elif pp > 1:
            out["output_layer.weight"] = Entry(("model.embed_tokens.weight",), "plain", 0, copy=True)
    return out


def _layer(shape: Architecture, m: str, h: str) -> dict[str, Entry]:
    family = shape.kind
    attention, mlp = h + "self_attn.", h + "mlp."
    qkv = ["qkv_proj"] if family.fused_qkv else [f"{x}_proj" for x in "qkv"]
    gated = ["gate_up_proj"] if family.fused_mlp else ["gate_proj", "up_proj"]
    plain = {
        "input_layernorm": "input_layernorm",
        # Hugging Face's name is for the place: the norm before the MLP.
        "pre_mlp_layernorm": "post_attention_layernorm",
    }
    if shape.qk_norm:
        plain |= {f"self_attention.{x}_layernorm": f"self_attn.{x}_norm" for x in "qk"}
    if family.post_norms:
        plain |= {"self_attn_bda.norm": "post_self_attn_layernorm", "mlp_bda.norm": "post_mlp_layernorm"}
    out = {f"{m}{ours}.weight": Entry((f"{h}{theirs}.weight",), "plain", None) for ours, theirs in plain.items()}
    for kind in ("weight", "bias") if shape.qkv_bias else ("weight",):
        names = tuple(f"{attention}{x}.{kind}" for x in qkv)
        out[f"{m}self_attention.linear_qkv.{kind}"] = Entry(names, "qkv", 0)
    out[m + "self_attention.linear_proj.weight"] = Entry((attention + "o_proj.weight",), "plain", 1)
    out[m + "mlp.linear_fc1.weight"] = Entry(tuple(f"{mlp}{x}.weight" for x in gated), "gated", 1)
    out[m + "mlp.linear_fc2.weight"] = Entry((mlp + "down_proj.weight",), "plain", 1)
    return out


def hf_shapes(shape: Architecture) -> dict[str, tuple[int, ...]]:
    hidden, q, kv = shape.hidden, shape.heads * shape.head_dim, shape.groups * shape.head_dim
    by_suffix: dict[str, tuple[int, ...]] = {
        "q_proj.weight": (q, hidden),
        "k_proj.weight": (kv, hidden),
        "v_proj.weight": (kv, hidden),
        "qkv_proj.weight": (q + 2 * kv, hidden),
        "q_proj.bias": (q,),
        "k_proj.bias": (kv,),
        "v_proj.bias": (kv,),
        "q_norm.weight": (shape.head_dim,),
        "k_norm.weight": (shape.head_dim,),
        "o_proj.weight": (hidden, q),
        "gate_proj.weight": (shape.ffn, hidden),
        "up_proj.weight": (shape.ffn, hidden),
        "gate_up_proj.weight": (2 * shape.ffn, hidden),
        "down_proj.weight": (hidden, shape.ffn),
        "embed_tokens.weight": (shape.vocab, hidden),
        "lm_head.weight": (shape.vocab, hidden),
    }
    names = [name for entry in stage_entries(shape, 1, 0).values() for name in entry.hf]
    return {name: by_suffix.get(".".join(name.split(".")[-2:]), (hidden,)) for name in names}


def _per_group(shape: Architecture) -> tuple[int, int]:
    return shape.heads // shape.groups * shape.head_dim, shape.head_dim


def cut(entry: Entry, place: ReplicaPlace) -> tuple[int, int]:
    """Into how many parts a parameter is cut over ranks, and which one this rank holds."""
    return (1, 0) if entry.dim is None else (place.tp, place.tp_rank)


def from_hf(entry: Entry, get: Callable[[str], torch.Tensor], shape: Architecture, split: ReplicaPlace) -> torch.Tensor:
    """This rank's part of a parameter; ``get`` returns a full Hugging Face tensor by name."""
    parts = [get(name) for name in entry.hf]
    if entry.layout == "qkv" and len(parts) == 1:
        q, kv = (shape.groups * rows for rows in _per_group(shape))
        parts = list(torch.split(parts[0], [q, kv, kv]))
    elif entry.layout == "gated" and len(parts) == 1:
        parts = list(parts[0].chunk(2))
    if entry.layout == "qkv":
        full = torch.cat([x.reshape(shape.groups, -1, *x.shape[1:]) for x in parts], dim=1).reshape(
            -1, *parts[0].shape[1:]
        )
    elif entry.layout == "gated":
        full = torch.stack(parts)
    else:
        full = parts[0]
    if entry.dim is not None and split.tp > 1:
        full = full.chunk(split.tp, entry.dim)[split.tp_rank]
    return full.reshape(-1, full.shape[-1]) if entry.layout == "gated" else full


def to_hf(entry: Entry, parts: list[torch.Tensor], shape: Architecture) -> list[torch.Tensor]:
    """Full Hugging Face tensors, in the order of ``entry.hf``, from the parts of all tensor-parallel ranks.

    They are fresh, contiguous memory.
    """
    if entry.layout == "plain":
        return [parts[0].clone() if entry.dim is None else torch.cat(parts, entry.dim)]
    if entry.layout == "gated":
        halves = [part.chunk(2) for part in parts]
        split = [torch.cat([half[i] for half in halves]) for i in range(2)]
    else:
        full = torch.cat(parts)
        q, kv = _per_group(shape)
        grouped = full.view(shape.groups, q + 2 * kv, *full.shape[1:])
        split = [x.reshape(-1, *full.shape[1:]).clone() for x in torch.split(grouped, [q, kv, kv], dim=1)]
    return split if len(entry.hf) > 1 else [torch.cat(split)]


def gather(tensors: dict[str, torch.Tensor], shape: Architecture, split: ReplicaPlace) -> dict[str, torch.Tensor]:
    """Collect full Hugging Face tensors on the replica's rank 0, on the host; other ranks get an empty dict.

    Collective over one data-parallel copy.  ``tensors`` are this rank's parts by Megatron-Core name, of one dtype.
    """
    return {name: tensor.cpu() for name, tensor in gathered(tensors, shape, split)}


def gathered(
    tensors: Mapping[str, torch.Tensor], shape: Architecture, split: ReplicaPlace
) -> Iterator[tuple[str, torch.Tensor]]:
    """As `gather`, one tensor after the other and on the device; it must be exhausted on every rank."""
    if not split.gathers:
        return
    for name, entry in stage_entries(shape, split.pp, split.pp_rank).items():
        if entry.copy:
            continue
        part = tensors[name].detach()
        parts = [part]
        if entry.dim is not None and split.tp > 1:
            parts = [torch.empty_like(part) for _ in range(split.tp)]
            dist.all_gather(parts, part.contiguous(), group=split.tp_group)
        if split.tp_rank != 0:
            continue
        for hf_name, tensor in zip(entry.hf, to_hf(entry, parts, shape), strict=True):
            if split.pp_rank > 0:
                dist.send(tensor, 0)
            else:
                yield hf_name, tensor
    if split.tp_rank != 0 or split.pp_rank > 0:
        return
    shapes = hf_shapes(shape)
    like = next(iter(tensors.values()))
    for stage in range(1, split.pp):
        for entry in stage_entries(shape, split.pp, stage).values():
            for name in () if entry.copy else entry.hf:
                received = like.new_empty(shapes[name])
                dist.recv(received, stage * split.stage_stride)
                yield name, received
