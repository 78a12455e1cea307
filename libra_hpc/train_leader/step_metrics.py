"""The metrics of one step, made of the answers of the core and the replicas."""

from __future__ import annotations

from libra_hpc.protocol.trainer import StepDone


def train_metrics(replies: list[StepDone], tokens: int, wall_s: float, export_s: float) -> dict[str, float]:
    """Combine the answers of the core, which is first, and of all replicas to a batch of ``tokens`` tokens.

    The stage's own work excludes waits for a slower peer. The slowest member waits least: its reduce time is the true
    one.
    """
    reduce_s = min(r.reduce_s for r in replies)
    work = max(r.compute_s + r.optimizer_s for r in replies) + reduce_s + export_s
    # Loss, ratios and entropy travel with the gradients: the core has them of all.
    core = replies[0]
    replayed, loss_tokens = sum(r.replayed for r in replies), sum(r.loss_tokens for r in replies)
    means = {
        "entropy": core.entropy,
        "ratio_mean": core.ratio_mean,
        "ratio_truncated": core.ratio_truncated,
        "clipped": core.clipped,
        "behaviour_kl": core.behaviour_kl,
        "logprob_gap": core.logprob_gap,
    }
    if core.reference_kl is not None:
        means["reference_kl"] = core.reference_kl
    return {
        "loss": core.loss,
        "grad_norm": core.grad_norm,
        # Where all groups have equal rewards no token is trained on, and there is no mean.
        **(means if loss_tokens else {}),
        "skipped": core.skipped,
        "loss_tokens": loss_tokens,
        "trained_tokens": sum(r.tokens for r in replies),
        "train_s": work,
        "train_wall_s": wall_s,
        "reduce_s": reduce_s,
        "export_s": export_s,
        "train_tokens_per_s": tokens / work if work > 0 else 0.0,
        **({"router_agreement": sum(r.agreed for r in replies) / replayed} if replayed else {}),
    }
