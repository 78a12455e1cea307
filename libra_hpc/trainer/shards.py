"""Split one global batch over the live replicas: pure.

- Groups are cut into ``minibatches`` contiguous parts, one optimizer step each.
- A part's samples go to the replicas by longest processing time first: their work differs by at most one sample's.
- Samples that share a beginning go together, as far as that makes the most loaded replica's work less.
- The loss is divided by what *all* samples of the part have together (`divisor`). Samples with zero advantage need no
  forward pass; leaving them out changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from libra_hpc.protocol.agents import Group
from libra_hpc.protocol.trainer import Sample

from .model.prefixes import FamilyMember, families

TOKEN_BYTES = 4
FAMILIES = (math.inf, 1.0, 0.5, 0.25, 0.0)
"""Most work of samples that go together, as shares of a replica's: the best is taken. Large ones compute few beginnings
twice, small ones are even."""


class SampleWork(NamedTuple):
    """How much work a sample is, in that of a token without attention."""

    attention: float = 0.0
    """Work of attention per squared token."""
    shares: bool = False
    """Whether common beginnings are computed once."""

    def __call__(self, tokens: int) -> float:
        return tokens + self.attention * tokens**2


PLAIN = SampleWork()
"""Tokens alone count."""


def tokens_of(sample: Sample) -> int:
    return len(sample.tokens) // TOKEN_BYTES


def loss_tokens_of(sample: Sample) -> int:
    return len(sample.loss_mask) - sample.loss_mask.count(0)


def divisor(samples: Iterable[Sample], aggregate: str, longest: int) -> int:
    """By which a minibatch's summed loss is divided: its loss tokens, or its trajectories that have any.

    ``constant``: these times ``longest`` tokens (arXiv 2503.20783).
    """
    counts = [(sample.trajectory, loss_tokens_of(sample)) for sample in samples]
    if aggregate == "token":
        return sum(count for _, count in counts)
    return len({name for name, count in counts if count}) * (longest if aggregate == "constant" else 1)


Shards = list[tuple[tuple[Sample, ...], ...]]


def shard(
    groups: Sequence[Group],
    replicas: int,
    minibatches: int,
    skip_zero_advantage: bool,
    work: SampleWork = PLAIN,
    aggregate: str = "token",
    longest: int = 1,
) -> tuple[Shards, tuple[int, ...]]:
    """Return (per replica: its samples of every minibatch, divisor of every global minibatch).

    Depends on the arguments alone: a step that is redone with the same members has the same shards.
    """
    parts = min(minibatches, len(groups)) or 1
    shards: list[list[tuple[Sample, ...]]] = [[] for _ in range(replicas)]
    divisors: list[int] = []
    for part in range(parts):
        begin, end = part * len(groups) // parts, (part + 1) * len(groups) // parts
        samples = [sample for group in groups[begin:end] for sample in group.samples]
        divisors.append(divisor(samples, aggregate, longest))
        if skip_zero_advantage:
            samples = [sample for sample in samples if sample.advantage != 0.0]
        for own, chosen in zip(shards, spread(samples, replicas, work), strict=True):
            own.append(chosen)
    return [tuple(minibatch) for minibatch in shards], tuple(divisors)


def spread(samples: Iterable[Sample], ranks: int, work: SampleWork = PLAIN) -> list[tuple[Sample, ...]]:
    """Samples of each of ``ranks`` data-parallel ranks, their work balanced; depends on the arguments alone."""
    ordered = sorted(samples, key=lambda sample: sample.uid)
    found = [[FamilyMember(place, 0)] for place in range(len(ordered))]
    if work.shares:
        found = families([np.frombuffer(sample.tokens, np.int32) for sample in ordered])
    costs = [[(place, work(tokens_of(ordered[place])), work(shared)) for place, shared in family] for family in found]
    mean = sum(whole - shared for family in costs for _, whole, shared in family) / ranks
    plans = [_deal(_together(costs, share * mean), ranks) for share in (FAMILIES if work.shares else FAMILIES[-1:])]
    _, chosen = min(plans, key=lambda plan: plan[0])
    return [tuple(ordered[place] for place in own) for own in chosen]


def _together(costs: list[list[tuple[int, float, float]]], most: float) -> list[tuple[float, list[int]]]:
    """Work and samples of the units that stay together: parts of a family, of at most ``most`` or one sample.

    ``costs``: of each sample of a family, its place, its work alone, and what of it the sample before has done.
    """
    units: list[tuple[float, list[int]]] = []
    for family in costs:
        for place, whole, shared in family:
            if shared and units[-1][0] + whole - shared <= most:
                units[-1] = units[-1][0] + whole - shared, [*units[-1][1], place]
            else:
                units.append((whole, [place]))
    return units


def _deal(units: list[tuple[float, list[int]]], ranks: int) -> tuple[float, list[list[int]]]:
    """The work of the most loaded rank, and the samples of each."""
    load = [0.0] * ranks
    chosen: list[list[int]] = [[] for _ in range(ranks)]
    for cost, own in sorted(units, key=lambda unit: (-unit[0], unit[1])):
        rank = load.index(min(load))
        load[rank] += cost
        chosen[rank] += own
    return max(load), chosen
