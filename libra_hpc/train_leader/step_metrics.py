"""The metrics of one step, made of the answers of the core and the replicas, and of the weights before it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from libra_hpc.protocol.trainer import Offered, StepDone


def train_metrics(replies: list[StepDone], tokens: int, wall_s: float) -> dict[str, float]:
    """Combine the answers of the core, which is first, and of all replicas to a batch of ``tokens`` tokens.

    ``wall_s``: from when the batch was complete; its portions may have been trained before. The stage's own work
    excludes waits for a slower peer. The slowest member waits least: its reduce time is the true one.
    """
    reduce_s = min(r.reduce_s for r in replies)
    work = max(r.compute_s + r.optimizer_s for r in replies) + reduce_s
    # Loss, ratios and entropy travel with the gradients: the core has them of all.
    core = replies[0]
    loss_tokens = sum(r.loss_tokens for r in replies)
    means = {
        "entropy": core.entropy,
        "ratio_mean": core.ratio_mean,
        "ratio_truncated": core.ratio_truncated,
        "clipped": core.clipped,
        "masked": core.masked,
        "behaviour_kl": core.behaviour_kl,
        "kl_clamped": core.kl_clamped,
        "logprob_gap": core.logprob_gap,
        "reference_kl": math.nan if core.reference_kl is None else core.reference_kl,
    }
    # Where all groups have equal rewards no token is trained on, and there is no mean.
    found = {"loss": core.loss, "grad_norm": core.grad_norm, **(means if loss_tokens else {})}
    return {
        # Skipped updates have none, and 0.0 would be the best one.
        **{name: value for name, value in found.items() if math.isfinite(value)},
        "skipped": core.skipped,
        "loss_tokens": loss_tokens,
        "trained_tokens": sum(r.tokens for r in replies),
        "shared_tokens": sum(r.shared_tokens for r in replies),
        "train_s": work,
        "train_ahead_s": max(0.0, work - wall_s),
        "train_wall_s": wall_s,
        "reduce_s": reduce_s,
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
