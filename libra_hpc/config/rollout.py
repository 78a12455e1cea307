"""Sections about rollout and planning."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from .base import Section


class RolloutSection(Section):
    """``[rollout]``: vLLM replicas and the scheduler that feeds them."""

    tp: int = Field(1, ge=1)
    """Tensor parallelism of the engines of one rollout node."""
    engines_per_node: int = Field(1, ge=1)
    policy: str = "cmlfq"
    """Scheduling policy: ``cmlfq`` or ``least_loaded``."""
    temperature: float = Field(1.0, gt=0)
    max_model_len: int = Field(4096, ge=16)
    """Longest context of a trajectory in tokens; a longer episode ends by length."""
    max_num_seqs: int = Field(64, ge=1)
    """Most sequences an engine runs at once."""
    max_inflight: int = Field(96, ge=1)
    """Most turns the leader keeps at one engine; somewhat more than ``max_num_seqs``, so that a finished turn's place is taken without a round trip."""
    kv_cache_mb: int = Field(0, ge=0)
    """KV cache per device in MiB; 0: what vLLM takes by default (90 % of the device)."""
    block_size: int = Field(32, ge=8)
    """KV block in tokens: the grain of prefix reuse."""
    threads: int = Field(1, ge=1)
    """CPU threads per engine process."""
    max_trajectories: int = Field(0, ge=0)
    """Most trajectories open at once; 0: (eta + 1) * prompts_per_step * group_size."""


class PlannerSection(Section):
    """``[planner]``: when the hybrid nodes change role."""

    enabled: bool = True
    hybrid_start: Literal["rollout", "train"] = "rollout"
    """Role of the hybrid nodes when the job starts."""
    interval_s: float = Field(5.0, gt=0)
    """Seconds between two looks at the plan."""
    horizon_s: float = Field(300.0, gt=0)
    """Seconds over which a move must pay."""
    margin: float = Field(1.5, ge=1)
    """A move's predicted gain over the horizon must exceed its cost by this factor."""
    min_gain: float = Field(0.05, ge=0)
    """... and be at least this share of the present step time."""
    min_dwell_s: float = Field(20.0, ge=0)
    """A node that moved stays at least this long."""
    switch_cost_s: float = Field(15.0, gt=0)
    """Prior of a move's cost in seconds of the moving node; replaced by measured moves."""
