"""Columns of `metrics.jsonl` that come from the replicas' answers to one step."""

from __future__ import annotations

from libra_hpc.protocol.trainer import StepDone


def train_columns(replies: list[StepDone], tokens: int, wall_s: float, export_s: float) -> dict[str, float]:
    """Columns of one step.  The stage's own work excludes waiting for a slower peer: the slowest member waits least,
    so its reduce time is the true one."""
    work = max(r.compute_s + r.optimizer_s for r in replies) + min(r.reduce_s for r in replies) + export_s
    # Loss, ratios and entropy are sums over all replicas in every reply: they travel with the gradients.
    any_reply = replies[0]
    return {
        "loss": any_reply.loss,
        "grad_norm": any_reply.grad_norm,
        "entropy": any_reply.entropy,
        "ratio_mean": any_reply.ratio_mean,
        "ratio_truncated": any_reply.ratio_truncated,
        "logprob_gap": any_reply.logprob_gap,
        "skipped": float(any_reply.skipped),
        "loss_tokens": float(sum(r.loss_tokens for r in replies)),
        "trained_tokens": float(sum(r.tokens for r in replies)),
        "train_s": work,
        "train_wall_s": wall_s,
        "reduce_s": min(r.reduce_s for r in replies),
        "export_s": export_s,
        "train_tokens_per_s": tokens / work if work > 0 else 0.0,
    }
