"""Which elements of the flat buffers go from whom to whom between a core and its elastic replicas; pure.

The core's data-parallel ranks own equal pieces of every bucket (`libra_hpc.train.optimizer_state`). The elastic
replicas sum their gradients among themselves; then each stands for an equal part of a bucket. So the core's links
carry one gradient, however many replicas there are. Weights take the same way back.

Ranks are those of one group: the core's data-parallel ranks first, then the replicas.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

ALIGNMENT = 128
"""Megatron-Core pads a bucket to a multiple of this and of the number of owners."""


class Transfer(NamedTuple):
    """Elements ``begin:end`` of a bucket that a replica and an owner exchange."""

    bucket: int
    begin: int
    end: int
    owner: int
    replica: int


def owned(size: int, owners: int) -> list[tuple[int, int]]:
    """The part of a bucket of ``size`` elements that each of ``owners`` ranks has, without padding."""
    step = math.lcm(owners, ALIGNMENT)
    each = -(-size // step) * step // owners
    return [(min(i * each, size), min((i + 1) * each, size)) for i in range(owners)]


def parts(size: int, replicas: int) -> list[tuple[int, int]]:
    """The part of a bucket for which each of ``replicas`` stands."""
    each = -(-size // replicas)
    return [(min(i * each, size), min((i + 1) * each, size)) for i in range(replicas)]


def step_transfers(sizes: Sequence[int], owners: int, replicas: int, chunk: int) -> list[Transfer]:
    """Transfers of a step, gradients or weights, of at most ``chunk`` elements; all ranks act in this order."""
    return list(_cut(sizes, owners, replicas, chunk, whole=False))


def join_transfers(sizes: Sequence[int], owners: int, replicas: int, chunk: int) -> list[Transfer]:
    """Transfers that give every replica all weights."""
    return list(_cut(sizes, owners, replicas, chunk, whole=True))


def _cut(sizes: Sequence[int], owners: int, replicas: int, chunk: int, *, whole: bool) -> Iterator[Transfer]:
    for bucket, size in enumerate(sizes):
        wanted = [(0, size)] * replicas if whole else parts(size, replicas)
        for owner, (first, last) in enumerate(owned(size, owners)):
            for replica, (low, high) in enumerate(wanted):
                end = min(last, high)
                for begin in range(max(first, low), end, chunk):
                    yield Transfer(bucket, begin, min(begin + chunk, end), owner, owners + replica)
