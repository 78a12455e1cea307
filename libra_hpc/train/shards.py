"""Splitting one global batch over the live replicas: pure.

A batch's groups are cut into ``minibatches`` contiguous parts (one optimizer step each); each part's samples go to the
replicas by longest processing time first, so that token counts, which is what a packed replica's time depends on,
differ by at most one sample.  The divisor of the token-mean loss is the part's number of generated tokens over *all*
its samples, also those whose advantage is zero and that need no forward pass: leaving them out saves time and changes
nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from libra_hpc.protocol.mesh import Group
from libra_hpc.protocol.trainer import Sample

TOKEN_BYTES = 4


def tokens_of(sample: Sample) -> int:
    """Length of a sample in tokens."""
    return len(sample.tokens) // TOKEN_BYTES


def loss_tokens_of(sample: Sample) -> int:
    """Number of tokens the policy generated."""
    return sample.loss_mask.count(1)


Shards = list[tuple[tuple[Sample, ...], ...]]


def shard(
    groups: Sequence[Group], replicas: int, minibatches: int, skip_zero_advantage: bool
) -> tuple[Shards, tuple[int, ...]]:
    """Return (per replica: its samples of every minibatch, loss tokens of every global minibatch).

    The assignment depends only on the arguments, so a step that is redone with the same members sees the same shards.
    """
    parts = min(minibatches, len(groups)) or 1
    shards: list[list[tuple[Sample, ...]]] = [[] for _ in range(replicas)]
    totals: list[int] = []
    for part in range(parts):
        begin, end = part * len(groups) // parts, (part + 1) * len(groups) // parts
        samples = [sample for group in groups[begin:end] for sample in group.samples]
        totals.append(sum(map(loss_tokens_of, samples)))
        if skip_zero_advantage:
            samples = [sample for sample in samples if sample.advantage != 0.0]
        samples.sort(key=lambda sample: (-tokens_of(sample), sample.uid))
        load = [0] * replicas
        chosen: list[list[Sample]] = [[] for _ in range(replicas)]
        for sample in samples:
            replica = load.index(min(load))
            load[replica] += tokens_of(sample)
            chosen[replica].append(sample)
        for replica in range(replicas):
            shards[replica].append(tuple(chosen[replica]))
    return [tuple(minibatch) for minibatch in shards], tuple(totals)
