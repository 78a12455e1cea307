"""Which elements of the flat buffers go from whom to whom between a core and its elastic replicas; pure.

In every world, processes with the same parameters (its *copies*) own equal pieces of every bucket: Megatron-Core sums
gradients so that each has its piece. The replicas sum these pieces among themselves; then each stands for an equal part
of a piece. So the core's links carry one gradient, however many replicas there are. Weights take the same way back.

Ranks are those of one group: the core's copies first, then the copies of each replica.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

ALIGNMENT = 128
"""Megatron-Core pads a bucket to a multiple of this and of the number of copies."""


class GroupMembers(NamedTuple):
    """Processes of one group."""

    core: int
    """Copies in the core."""
    copies: int
    """Copies in each replica."""
    replicas: int

    @property
    def size(self) -> int:
        return self.core + self.replicas * self.copies

    def rank(self, replica: int, copy: int) -> int:
        """Return the rank of a copy in a replica, which count from 0."""
        return self.core + replica * self.copies + copy


class Transfer(NamedTuple):
    """Elements ``begin:end`` of a bucket that a process of a replica and one of the core exchange."""

    bucket: int
    begin: int
    end: int
    core: int
    peer: int
    """Rank of the replica's process."""


def owned(size: int, copies: int) -> list[tuple[int, int]]:
    """The piece of a bucket of ``size`` elements that each of ``copies`` processes has, without padding."""
    step = math.lcm(copies, ALIGNMENT)
    each = -(-size // step) * step // copies
    return [(min(i * each, size), min((i + 1) * each, size)) for i in range(copies)]


def parts(piece: tuple[int, int], replicas: int) -> list[tuple[int, int]]:
    """The part of a piece for which each of ``replicas`` stands."""
    first, last = piece
    each = -(-(last - first) // replicas)
    return [(min(first + i * each, last), min(first + (i + 1) * each, last)) for i in range(replicas)]


def step_transfers(sizes: Sequence[int], members: GroupMembers, chunk: int) -> list[Transfer]:
    """Transfers of a step, gradients or weights, of at most ``chunk`` elements; all ranks act in this order."""
    return list(_cut(sizes, members, chunk, whole=False))


def join_transfers(sizes: Sequence[int], members: GroupMembers, chunk: int) -> list[Transfer]:
    """Transfers that give every replica all weights, a piece to each copy."""
    return list(_cut(sizes, members, chunk, whole=True))


def rounds(plan: Sequence[Transfer], most: int) -> list[list[Transfer]]:
    """Transfers that cross at once, in the order of the plan: in each round a rank has at most ``most`` elements."""
    out: list[list[Transfer]] = []
    last: dict[int, tuple[int, int]] = {}
    """Round in which a rank last has a transfer, and its elements there."""
    for transfer in plan:
        ends = [(rank, *last.get(rank, (0, 0))) for rank in (transfer.core, transfer.peer)]
        size, at = transfer.end - transfer.begin, max(number for _, number, _ in ends)
        at += any(number == at and has + size > most for _, number, has in ends)
        for rank, number, has in ends:
            last[rank] = at, size + (has if number == at else 0)
        if at == len(out):
            out.append([])
        out[at].append(transfer)
    return out


def _cut(sizes: Sequence[int], members: GroupMembers, chunk: int, *, whole: bool) -> Iterator[Transfer]:
    replicas = members.replicas
    for bucket, size in enumerate(sizes):
        wanted = [
            (members.rank(replica, copy), part)
            for copy, piece in enumerate(owned(size, members.copies))
            for replica, part in enumerate([piece] * replicas if whole else parts(piece, replicas))
        ]
        for core, (first, last) in enumerate(owned(size, members.core)):
            for peer, (low, high) in wanted:
                end = min(last, high)
                for begin in range(max(first, low), end, chunk):
                    yield Transfer(bucket, begin, min(begin + chunk, end), core, peer)
