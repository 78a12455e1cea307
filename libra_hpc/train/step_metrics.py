"""The metrics of one step, made of the replicas' answers."""

from __future__ import annotations

from libra_hpc.protocol.metrics import TrainMetrics
from libra_hpc.protocol.trainer import StepDone


def train_metrics(replies: list[StepDone], tokens: int, wall_s: float, export_s: float) -> TrainMetrics:
    """Combine the answers of all replicas to a batch of ``tokens`` tokens.

    The stage's own work excludes waits for a slower peer. The slowest member waits least: its reduce time is the true
    one.
    """
    reduce_s = min(r.reduce_s for r in replies)
    work = max(r.compute_s + r.optimizer_s for r in replies) + reduce_s + export_s
    # Loss, ratios and entropy travel with the gradients: every reply has the same ones, over all replicas.
    any_reply = replies[0]
    replayed = sum(r.replayed for r in replies)
    return TrainMetrics(
        loss=any_reply.loss,
        grad_norm=any_reply.grad_norm,
        entropy=any_reply.entropy,
        ratio_mean=any_reply.ratio_mean,
        ratio_truncated=any_reply.ratio_truncated,
        logprob_gap=any_reply.logprob_gap,
        skipped=any_reply.skipped,
        loss_tokens=sum(r.loss_tokens for r in replies),
        trained_tokens=sum(r.tokens for r in replies),
        train_s=work,
        train_wall_s=wall_s,
        reduce_s=reduce_s,
        export_s=export_s,
        train_tokens_per_s=tokens / work if work > 0 else 0.0,
        router_agreement=sum(r.agreed for r in replies) / replayed if replayed else None,
    )
