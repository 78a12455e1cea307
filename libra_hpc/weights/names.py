"""Parameters of Megatron-Core <-> Hugging Face tensors, for any split of a model over ranks.

It holds for any tensor of a parameter's shape: weights, gradients, Adam moments.  Names: `libra_hpc.models.tensors`.
Two layouts differ:

- ``linear_qkv`` interleaves per query group: its q heads, its k head, its v head.  Ranks have equal shares of these
  rows, so with fewer groups than ranks a cut may go through a head.
- ``linear_fc1`` holds gate and up halves *per tensor-parallel rank*.

Ranks of a world count tensor ranks fastest, then context, data, stage; for experts the ranks of a stage count
expert-tensor ranks fastest, then expert-parallel ones, then copies.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from libra_hpc.models.adapters import adapter_entries
from libra_hpc.models.architecture import Architecture
from libra_hpc.models.tensors import Entry, stage_entries


class ReplicaPlace(NamedTuple):
    tp: int
    tp_rank: int
    pp: int
    pp_rank: int
    cp: int = 1
    cp_rank: int = 0
    dp: int = 1
    dp_rank: int = 0
    ep: int = 1
    etp: int = 0
    """Tensor ranks of an expert; 0: ``tp``."""

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


def own_entries(shape: Architecture, place: ReplicaPlace) -> dict[str, Entry]:
    """Parameters of one rank, by Megatron-Core name, in a fixed order."""
    each = shape.experts // place.ep
    experts = range(place.ep_rank * each, (place.ep_rank + 1) * each)
    return stage_entries(shape, place.pp, place.pp_rank, experts)


def trained_entries(shape: Architecture, place: ReplicaPlace) -> dict[str, Entry]:
    """What of one rank is trained: its parameters, or the adapters beside them."""
    return adapter_entries(shape, own_entries(shape, place))


def _per_group(shape: Architecture) -> tuple[int, int]:
    return shape.group_rows, shape.head_dim


def cut(entry: Entry, place: ReplicaPlace) -> tuple[int, int]:
    """Into how many parts a parameter is cut over ranks, and which one this rank holds."""
    if entry.dim is None:
        return 1, 0
    if entry.stacked:
        return place.ep, place.ep_rank
    return (place.tp, place.tp_rank) if entry.expert is None else (place.expert_ranks, place.etp_rank)


def sections(entry: Entry, shape: Architecture) -> tuple[int, ...]:
    """Rows of a tensor with several sections."""
    assert shape.delta_net is not None
    return shape.delta_net.sections(".".join(entry.hf[0].split(".")[-2:]))


def from_hf(entry: Entry, get: Callable[[str], torch.Tensor], shape: Architecture, split: ReplicaPlace) -> torch.Tensor:
    """This rank's part of a parameter; ``get`` returns a full Hugging Face tensor by name."""
    parts = [get(name) for name in entry.hf]
    if entry.layout == "qkv" and len(parts) == 1:
        q, kv = (shape.kv_heads * rows for rows in _per_group(shape))
        parts = list(torch.split(parts[0], [q, kv, kv]))
    elif entry.layout == "gated" and len(parts) == 1:
        parts = list(parts[0].chunk(2))
    if entry.layout == "qkv":
        full = torch.cat([x.reshape(shape.kv_heads, -1, *x.shape[1:]) for x in parts], dim=1).reshape(
            -1, *parts[0].shape[1:]
        )
    elif entry.layout == "gated":
        full = torch.stack(parts)
    elif entry.layout == "sections":
        rows = torch.split(parts[0], list(sections(entry, shape)))
        full = torch.cat([x.reshape(cut(entry, split)[0], -1, *x.shape[1:]) for x in rows], dim=1).flatten(0, 1)
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
    if entry.layout == "sections":
        counts = [rows // len(parts) for rows in sections(entry, shape)]
        return [torch.cat([torch.cat(own) for own in zip(*(torch.split(part, counts) for part in parts), strict=True)])]
    if entry.layout == "gated":
        halves = [part.chunk(2) for part in parts]
        split = [torch.cat([half[i] for half in halves]) for i in range(2)]
    else:
        full = torch.cat(parts)
        q, kv = _per_group(shape)
        grouped = full.view(shape.kv_heads, q + 2 * kv, *full.shape[1:])
        split = [x.reshape(-1, *full.shape[1:]).clone() for x in torch.split(grouped, [q, kv, kv], dim=1)]
    return split if len(entry.hf) > 1 else [torch.cat(split)]
