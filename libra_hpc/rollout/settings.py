"""What the rollout leader needs of the run file."""

from __future__ import annotations

import msgspec

from libra_hpc.config.run import RunConfig
from libra_hpc.process.deadlines import DeadlineSettings


class RolloutSettings(msgspec.Struct, frozen=True):
    """Plain numbers; units as in the run file."""

    task: str
    prompts_per_step: int
    group_size: int
    eta: int
    steps: int
    temperature: float
    max_model_len: int
    max_inflight: int
    max_open_groups: int
    in_order: bool
    max_failed_share: float = 0.2
    failed_patience_s: float = 600.0
    rank: int = 0
    """The leader's own."""
    deadlines: DeadlineSettings = DeadlineSettings()


def rollout_settings(config: RunConfig, rank: int) -> RolloutSettings:
    """Those of a run, for the leader at ``rank``."""
    algorithm, rollout, deadlines = config.algorithm, config.rollout, config.deadlines
    whole = (algorithm.eta + 1) * algorithm.prompts_per_step
    return RolloutSettings(
        task=config.task.name,
        prompts_per_step=algorithm.prompts_per_step,
        group_size=algorithm.group_size,
        eta=algorithm.eta,
        steps=config.run.steps,
        temperature=rollout.temperature,
        max_model_len=rollout.max_model_len,
        max_inflight=rollout.max_inflight,
        max_open_groups=max(1, rollout.max_trajectories // algorithm.group_size) if rollout.max_trajectories else whole,
        in_order=algorithm.batch_order == "data",
        max_failed_share=config.task.max_failed_share,
        failed_patience_s=config.task.failed_patience_s,
        rank=rank,
        deadlines=DeadlineSettings(deadlines.floor_s, deadlines.first_s, deadlines.factor),
    )
