"""The metrics of one step, made of the answers of the core and the replicas, and of the weights before it."""

from __future__ import annotations

from collections.abc import Sequence

from libra_hpc.facts.columns import merged
from libra_hpc.protocol.trainer import Offered, StepDone


def train_metrics(replies: list[StepDone], tokens: int, wall_s: float) -> dict[str, float]:
    """Combine the answers of the core, which is first, and of all replicas to a batch of ``tokens`` tokens.

    ``wall_s``: from when the batch was complete; its portions may have been trained before.
    """
    numbers = merged([reply.numbers for reply in replies])
    work = numbers["train_s"] + numbers["reduce_s"]
    return {
        **numbers,
        "train_s": work,
        "train_ahead_s": max(0.0, work - wall_s),
        "train_wall_s": wall_s,
        "train_tokens_per_s": tokens / work if work > 0 else 0.0,
    }


def offer_metrics(offers: Sequence[Offered], version: int, element_bytes: int) -> dict[str, float]:
    """What the offers of ``version`` have; nothing where they are of another one."""
    if not offers or offers[0].version != version:
        return {}
    changed, total = sum(offer.changed for offer in offers), sum(offer.total for offer in offers)
    return {
        "changed_share": changed / total,
        "weights_mb": sum(offer.size for offer in offers) / 1e6,
        "weights_dense_mb": total * element_bytes / 1e6,
        "diff_s": max(offer.seconds for offer in offers),
    }
