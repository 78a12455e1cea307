"""Which parameters a rank has, and which part of each (names: `libra_hpc.models.architecture`).

Ranks of a world count tensor ranks fastest, then context, data, stage; for experts the ranks of a stage count
expert-tensor ranks fastest, then expert-parallel ones, then copies.
"""

from __future__ import annotations

from typing import NamedTuple

from libra_hpc.models.adapters import adapter_entries
from libra_hpc.models.architecture import Architecture, Entry, stage_entries


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
