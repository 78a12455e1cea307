"""Split one global batch over the live replicas: pure.

- Groups are cut into ``minibatches`` contiguous parts, one optimizer step each.
- A part's samples go to the replicas by longest processing time first: their work differs by at most one sample's.
- The loss is divided by what *all* samples of the part have together (`divisor`). Samples with zero advantage need no
  forward pass; leaving them out changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from libra_hpc.protocol.agents import Group
from libra_hpc.protocol.trainer import Sample

TOKEN_BYTES = 4


def tokens_of(sample: Sample) -> int:
    return len(sample.tokens) // TOKEN_BYTES


def loss_tokens_of(sample: Sample) -> int:
    return sample.loss_mask.count(1)


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
    attention: float = 0.0,
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
        for own, chosen in zip(shards, spread(samples, replicas, attention), strict=True):
            own.append(chosen)
    return [tuple(minibatch) for minibatch in shards], tuple(divisors)


def spread(samples: Iterable[Sample], ranks: int, attention: float = 0.0) -> list[tuple[Sample, ...]]:
    """Samples of each of ``ranks`` data-parallel ranks, their work balanced; depends on the arguments alone.

    ``attention``: as in `libra_hpc.trainer.settings.attention_work`.
    """
    load = [0.0] * ranks
    chosen: list[list[Sample]] = [[] for _ in range(ranks)]
    for sample in sorted(samples, key=lambda sample: (-tokens_of(sample), sample.uid)):
        rank, tokens = load.index(min(load)), tokens_of(sample)
        load[rank] += tokens + attention * tokens**2
        chosen[rank].append(sample)
    return [tuple(own) for own in chosen]
