"""What one train step reports: the columns of a line of ``metrics.jsonl``.

- `BatchStats` travels with the batch, from the rollout leader to the train leader.
- `StepMetrics` travels with the step's report, from the train leader to rank 0.
- Rank 0 adds `COORDINATOR_COLUMNS` and writes the line.
"""

from __future__ import annotations

import msgspec


class BatchStats(msgspec.Struct, frozen=True):
    """What the rollout leader measured of a global batch; means and quantiles are over its trajectories."""

    reward: float
    reward_std: float
    trajectories: int
    staleness_mean: float
    """Weight versions between the first sampled token and the training."""
    staleness_max: int
    gen_tokens: int
    """Generated tokens of the whole batch."""
    gen_tokens_p50: float
    """Median over trajectories; next, the 95th percentile."""
    gen_tokens_p95: float
    turns_p50: float
    turns_p95: float
    context_p50: float
    """Tokens of the final context."""
    recomputed_tokens: int
    """Context tokens that engines computed again: after a move, new weights, or an eviction from a KV cache."""
    evicted_tokens: int
    """Of ``recomputed_tokens``: after an eviction."""
    failed: int
    """Trajectories left out after repeated failures."""
    retried: int
    """Failed attempts that another attempt followed."""
    rollout_s: float
    """Seconds in which the present engines generate such a batch."""
    extra: dict[str, float] = {}
    """Means of the task's own numbers (``info``); a trajectory without one counts as 0.0."""


class TrainMetrics(msgspec.Struct, frozen=True):
    """What the replicas answered to one step; means are over the loss tokens of all replicas."""

    loss: float
    """Mean."""
    grad_norm: float
    """Before clipping."""
    entropy: float
    """Mean, nats."""
    ratio_mean: float
    """Mean of pi_theta / pi_behaviour."""
    ratio_truncated: float
    """Share of tokens whose importance weight was truncated, 0..1."""
    logprob_gap: float
    """Mean |log pi_theta_old - log pi_behaviour| of the first minibatch."""
    skipped: int
    """Minibatches whose update was left out because it was not finite."""
    loss_tokens: int
    trained_tokens: int
    """All tokens that went through the model."""
    train_s: float
    """Own work of the stage in seconds: compute, reduce, export; without waits for slower replicas."""
    train_wall_s: float
    """Seconds from the batch's dispatch to its commit."""
    reduce_s: float
    export_s: float
    """Seconds of the last weight export."""
    train_tokens_per_s: float
    router_agreement: float | None = None
    """Share of the replayed choices of experts that the trainer would have made too; None: nothing was replayed."""


class StepMetrics(msgspec.Struct, frozen=True):
    """One committed step, as the train leader reports it."""

    batch: BatchStats
    generation: int
    """Membership generation that trained the step."""
    train_nodes: int
    replicas: int
    """Data-parallel replicas on these nodes."""
    wait_s: float
    """Seconds the trainer waited for the batch."""
    tokens: int
    step_s: float
    """Seconds since the commit before."""
    version: int
    """Weight version that the step produced."""
    train: TrainMetrics | None = None
    """None: no member trained the step, it was found committed in one that joined."""

    def columns(self) -> dict[str, float]:
        flat = {**_plain(self.batch), **self.batch.extra, **_plain(self)}
        return flat | (_plain(self.train) if self.train is not None else {})


def _plain(part: msgspec.Struct) -> dict[str, float]:
    return {
        name: float(value) for name, value in msgspec.structs.asdict(part).items() if isinstance(value, int | float)
    }


COORDINATOR_COLUMNS = ("t", "step", "rollout_nodes", "rollout_tokens_per_s", "expected_s")
COLUMNS = frozenset(
    {
        *BatchStats.__struct_fields__,
        *StepMetrics.__struct_fields__,
        *TrainMetrics.__struct_fields__,
        *COORDINATOR_COLUMNS,
    }
    - {"batch", "train", "extra"}
)
"""Every column but those of tasks, whose numbers must not take such a name."""
