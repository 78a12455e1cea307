"""Groups of trajectories, and the statistics of the global batch they become."""

from __future__ import annotations

from collections.abc import Sequence

from libra_hpc.protocol.mesh import Group

from .advantage import advantages
from .trajectory import Trajectory

RESERVED = (
    # of a batch, here and in the rollout leader
    "reward",
    "reward_std",
    "trajectories",
    "staleness_mean",
    "staleness_max",
    "gen_tokens",
    "gen_tokens_p50",
    "gen_tokens_p95",
    "turns_p50",
    "turns_p95",
    "context_p50",
    "failed",
    "retried",
    "rollout_s",
    # of the train leader
    "generation",
    "replicas",
    "wait_s",
    "tokens",
    "step_s",
    "version",
    "loss",
    "grad_norm",
    "entropy",
    "ratio_mean",
    "ratio_truncated",
    "logprob_gap",
    "skipped",
    "loss_tokens",
    "trained_tokens",
    "train_s",
    "train_wall_s",
    "reduce_s",
    "export_s",
    "train_tokens_per_s",
    # of the coordinator
    "t",
    "step",
    "rollout_nodes",
    "rollout_tokens_per_s",
    "expected_s",
)
"""Columns of `metrics.jsonl`. A task's own number of such a name gets the prefix `TASK_PREFIX`."""
TASK_PREFIX = "task_"


class GroupState:
    """The trajectories of one prompt; complete when none is open.

    ``recovered``: trajectories that an earlier start has finished or begun.
    """

    __slots__ = ("begun", "done", "failed", "index", "missing", "open", "retried")

    def __init__(self, index: int, samples: int, recovered: Sequence[Trajectory] = ()) -> None:
        self.index = index
        self.done = [trajectory for trajectory in recovered if trajectory.place == "done"]
        finished = {trajectory.sample for trajectory in self.done}
        self.begun = {trajectory.sample: trajectory for trajectory in recovered if trajectory.sample not in finished}
        self.missing = tuple(sample for sample in range(samples) if sample not in finished)
        """Samples to run, from the prompt or, those in ``begun``, from where they are."""
        self.open = len(self.missing)
        self.failed = self.retried = 0
        """Trajectories given up, and attempts that were tried again."""

    def to_group(self) -> Group:
        """The group for the trainer, advantages normalised within it."""
        self.done.sort(key=lambda t: t.sample)
        values = advantages([t.reward for t in self.done])
        return Group(self.index, tuple(t.sample_for_training(a) for t, a in zip(self.done, values, strict=True)))


def quantile(values: Sequence[float], q: float) -> float:
    """Nearest-rank quantile of a non-empty sequence."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


def batch_stats(groups: Sequence[GroupState], trainer_version: int) -> dict[str, float]:
    """Columns of `metrics.jsonl` for one batch; a number of the task that a trajectory lacks counts as 0.0.

    Staleness: weight versions between the first sampled token and the training step.
    """
    trajectories = [t for group in groups for t in group.done]
    if not trajectories:
        return {}
    rewards = [t.reward for t in trajectories]
    mean = sum(rewards) / len(rewards)
    staleness = [trainer_version - t.first_version for t in trajectories]
    generated = [float(t.attained) for t in trajectories]
    turns = [float(len(t.turns)) for t in trajectories]
    stats = {
        "reward": mean,
        "reward_std": (sum((r - mean) ** 2 for r in rewards) / len(rewards)) ** 0.5,
        "trajectories": float(len(trajectories)),
        "staleness_mean": sum(staleness) / len(staleness),
        "staleness_max": float(max(staleness)),
        "gen_tokens": sum(generated),
        "gen_tokens_p50": quantile(generated, 0.5),
        "gen_tokens_p95": quantile(generated, 0.95),
        "turns_p50": quantile(turns, 0.5),
        "turns_p95": quantile(turns, 0.95),
        "context_p50": quantile([float(len(t.context)) for t in trajectories], 0.5),
        "failed": float(sum(group.failed for group in groups)),
        "retried": float(sum(group.retried for group in groups)),
    }
    for key in sorted({key for t in trajectories for key in t.info}):
        name = f"{TASK_PREFIX}{key}" if key in RESERVED else key
        stats[name] = sum(t.info.get(key, 0.0) for t in trajectories) / len(trajectories)
    return stats
