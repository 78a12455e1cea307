"""Parameter names and layouts of Megatron-Core <-> Hugging Face, for any split of a model over ranks.

It holds for any tensor of a parameter's shape: weights, gradients, Adam moments.  Two layouts differ:

- ``linear_qkv`` interleaves per query group: its q heads, its k head, its v head.  Ranks have equal shares of these
  rows, so with fewer groups than ranks a cut may go through a head.
- ``linear_fc1`` holds gate and up halves *per tensor-parallel rank*.

Some families store q, k and v, or gate and up, as one Hugging Face tensor (`libra_hpc.models.supported.Family`).

A pipeline stage numbers its layers from 0, an expert-parallel rank its experts.  Ranks of a world count tensor ranks
fastest, then context, data, stage; for experts the ranks of a stage count expert-tensor ranks fastest, then
expert-parallel ones, then copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist

from libra_hpc.models.architecture import Architecture, stage_layers


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
    ep: int = 1
    etp: int = 0
    """Tensor ranks of an expert; 0: ``tp``."""
    etp_group: dist.ProcessGroup | None = None
    """Needed to gather when an expert has several tensor ranks."""

    @property
    def stage_rank(self) -> int:
        """Rank within the pipeline stage."""
        return self.tp_rank + self.tp * self.copy_rank

    @property
    def copy_rank(self) -> int:
        """Rank among the processes with the same dense weights, which share their optimizer state."""
        return self.cp_rank + self.cp * self.dp_rank

    @property
    def copies(self) -> int:
        """Processes with the same dense weights."""
        return self.cp * self.dp

    @property
    def expert_copies(self) -> int:
        """Processes with the same part of the same experts."""
        return self.stage_stride // (self.expert_ranks * self.ep)

    @property
    def expert_copy_rank(self) -> int:
        return self.stage_rank // (self.expert_ranks * self.ep)

    @property
    def expert_ranks(self) -> int:
        """Tensor ranks of an expert."""
        return self.etp or self.tp

    @property
    def etp_rank(self) -> int:
        return self.stage_rank % self.expert_ranks

    @property
    def ep_rank(self) -> int:
        return self.stage_rank // self.expert_ranks % self.ep

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
    expert: int | None = None
    """Number of the expert that it belongs to; ``dim`` is then cut over expert-tensor ranks."""


def own_entries(shape: Architecture, place: ReplicaPlace) -> dict[str, Entry]:
    """Parameters of one rank, by Megatron-Core name, in a fixed order."""
    each = shape.experts // place.ep
    experts = range(place.ep_rank * each, (place.ep_rank + 1) * each)
    return stage_entries(shape, place.pp, place.pp_rank, experts)


def stage_entries(shape: Architecture, pp: int, pp_rank: int, experts: range | None = None) -> dict[str, Entry]:
    """Parameters of one pipeline stage, by Megatron-Core name, in a fixed order; default: with all ``experts``."""
    experts = range(shape.experts) if experts is None else experts
    out: dict[str, Entry] = {}
    if pp_rank == 0:
        out["embedding.word_embeddings.weight"] = Entry(("model.embed_tokens.weight",), "plain", 0)
    stages = stage_layers(shape.layers, pp)
    first = sum(stages[:pp_rank])
    for local in range(stages[pp_rank]):
        ours, theirs = f"decoder.layers.{local}.", f"model.layers.{first + local}."
        out.update(_layer(shape, ours, theirs))
        mlp = (f"{ours}mlp.", f"{theirs}mlp.")
        out.update(_experts(shape, experts, *mlp) if shape.experts else _mlp(shape, *mlp))
    if pp_rank == pp - 1:
        out["decoder.final_layernorm.weight"] = Entry(("model.norm.weight",), "plain", None)
        if not shape.tied:
            out["output_layer.weight"] = Entry(("lm_head.weight",), "plain", 0)
        elif pp > 1:
            out["output_layer.weight"] = Entry(("model.embed_tokens.weight",), "plain", 0, copy=True)
    return out


def _layer(shape: Architecture, m: str, h: str) -> dict[str, Entry]:
    family = shape.kind
    attention = h + "self_attn."
    qkv = ["qkv_proj"] if family.fused_qkv else [f"{x}_proj" for x in "qkv"]
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
    return out


def _mlp(shape: Architecture, m: str, h: str, expert: int | None = None) -> dict[str, Entry]:
    gated = ("gate_up_proj",) if shape.kind.fused_mlp else ("gate_proj", "up_proj")
    return {
        f"{m}linear_fc1.weight": Entry(tuple(f"{h}{x}.weight" for x in gated), "gated", 1, expert=expert),
        f"{m}linear_fc2.weight": Entry((f"{h}down_proj.weight",), "plain", 1, expert=expert),
    }


def _experts(shape: Architecture, experts: range, m: str, h: str) -> dict[str, Entry]:
    out = {f"{m}router.weight": Entry((f"{h}gate.weight",), "plain", None)}
    for local, expert in enumerate(experts):
        out.update(_mlp(shape, f"{m}experts.local_experts.{local}.", f"{h}experts.{expert}.", expert))
    return out


def hf_shapes(shape: Architecture) -> dict[str, tuple[int, ...]]:
    hidden, q, kv = shape.hidden, shape.heads * shape.head_dim, shape.groups * shape.head_dim
    ffn = shape.moe_ffn if shape.experts else shape.ffn
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
        "gate_proj.weight": (ffn, hidden),
        "up_proj.weight": (ffn, hidden),
        "gate_up_proj.weight": (2 * ffn, hidden),
        "down_proj.weight": (hidden, ffn),
        "gate.weight": (shape.experts, hidden),
        "embed_tokens.weight": (shape.vocab, hidden),
        "lm_head.weight": (shape.vocab, hidden),
    }
    names = [name for entry in stage_entries(shape, 1, 0).values() for name in entry.hf]
    return {name: by_suffix.get(".".join(name.split(".")[-2:]), (hidden,)) for name in names}


def _per_group(shape: Architecture) -> tuple[int, int]:
    return shape.heads // shape.groups * shape.head_dim, shape.head_dim


def cut(entry: Entry, place: ReplicaPlace) -> tuple[int, int]:
    """Into how many parts a parameter is cut over ranks, and which one this rank holds."""
    if entry.dim is None:
        return 1, 0
    return (place.tp, place.tp_rank) if entry.expert is None else (place.expert_ranks, place.etp_rank)


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
    parts_of, part = cut(entry, split)
    if entry.dim is not None and parts_of > 1:
        full = full.chunk(parts_of, entry.dim)[part]
    return full.reshape(-1, full.shape[-1]) if entry.layout == "gated" else full


def to_hf(entry: Entry, parts: list[torch.Tensor], shape: Architecture) -> list[torch.Tensor]:
    """Full Hugging Face tensors, in the order of ``entry.hf``, from the parts of all ranks that share the parameter.

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
    first = not split.stage_rank and not split.pp_rank
    names = {entry.hf: name for name, entry in own_entries(shape, split).items()}
    shapes = hf_shapes(shape) if first else {}
    like = next(iter(tensors.values()))
    # All ranks go through the tensors in one order, so that none waits for another in a circle.
    for stage in range(split.pp) if first else (split.pp_rank,):
        for entry in stage_entries(shape, split.pp, stage).values():
            source = stage * split.stage_stride + _holder(entry, shape, split)
            if entry.copy:
                continue
            if first and source:
                for hf_name in entry.hf:
                    received = like.new_empty(shapes[hf_name])
                    dist.recv(received, source)
                    yield hf_name, received
            elif entry.hf in names and _shares(entry, shape, split):
                for hf_name, tensor in _whole(entry, tensors[names[entry.hf]].detach(), shape, split):
                    if first:
                        yield hf_name, tensor
                    else:
                        dist.send(tensor, 0)


def _whole(
    entry: Entry, part: torch.Tensor, shape: Architecture, split: ReplicaPlace
) -> Iterable[tuple[str, torch.Tensor]]:
    """Full tensors of a parameter on the rank that has its first part; collective over the ranks that share it."""
    parts = _parts(entry, part, split)
    return () if cut(entry, split)[1] else zip(entry.hf, to_hf(entry, parts, shape), strict=True)


def _holder(entry: Entry, shape: Architecture, split: ReplicaPlace) -> int:
    """The rank of a stage that hands the whole of a parameter to the process that collects."""
    return 0 if entry.expert is None else entry.expert // (shape.experts // split.ep) * split.expert_ranks


def _shares(entry: Entry, shape: Architecture, split: ReplicaPlace) -> bool:
    """Whether this rank's part of a parameter is collected: that of one copy is."""
    return 0 <= split.stage_rank - _holder(entry, shape, split) < cut(entry, split)[0]


def _parts(entry: Entry, part: torch.Tensor, split: ReplicaPlace) -> list[torch.Tensor]:
    """All parts of a parameter; collective over the ranks that share it."""
    count, _ = cut(entry, split)
    if count == 1:
        return [part]
    parts = [torch.empty_like(part) for _ in range(count)]
    dist.all_gather(parts, part.contiguous(), group=split.tp_group if entry.expert is None else split.etp_group)
    return parts
