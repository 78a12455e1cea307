"""Sections about the model and the learning algorithm."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from .base import Section


class ModelSection(Section):
    """``[model]``: the policy."""

    path: str = ""
    """Hugging Face folder (config.json, safetensors, tokenizer), on the shared file system."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"


class TaskSection(Section):
    """``[task]``: the environment."""

    name: str = "keychain"
    """A built-in task, or ``path/to/file.py:ClassName``."""
    options: dict[str, Any] = {}
    """Passed to the task's constructor."""
    tool_timeout_s: float = Field(10.0, gt=0)
    """Wall-clock limit of one tool call; a task may declare longer ones by tool (`Task.tool_limits`)."""
    tool_memory_mb: int = Field(512, ge=16)
    """Address-space limit of a tool process."""
    tool_output_bytes: int = Field(65536, ge=64)
    """A tool's output beyond this is cut off."""
    hosts: int = Field(1, ge=1)
    """Environment host processes."""
    tool_processes: int = Field(1, ge=1)
    """Sandboxed tool processes per host."""
    max_failed_share: float = Field(0.2, gt=0, lt=1)
    """When more than this share of the trajectories fails (the environment raises, times out, or answers what cannot be used), no prompt is admitted until
    an attempt succeeds."""
    failed_patience_s: float = Field(600.0, gt=0)
    """Seconds for which that may last; then the run fails with the most frequent error."""


class AlgorithmSection(Section):
    """``[algorithm]``: GRPO and its asynchronous bound."""

    prompts_per_step: int = Field(8, ge=1)
    """Prompts (groups) of one global batch, B."""
    group_size: int = Field(8, ge=2)
    """Trajectories sampled per prompt, n."""
    eta: int = Field(1, ge=0)
    """Staleness bound: a sample is trained at most this many versions after the version it was first sampled under; 0 is synchronous."""
    batch_order: Literal["data", "finish"] = "data"
    """``data``: prompts are trained in the data's order, so every batch is an unbiased draw; ``finish``: first finished, first trained, as far as eta
    allows, which waits less for slow groups but fills every other batch with the short ones."""
    clip: float = Field(0.2, gt=0, lt=1)
    """PPO clipping of pi_theta / pi_proximal."""
    is_truncation: float = Field(2.0, ge=1)
    """Upper bound of the truncated importance weight pi_proximal / pi_behaviour."""
    minibatches: int = Field(1, ge=1)
    """Optimizer steps per global batch."""
    kl_coef: float = Field(0.0, ge=0)
    skip_zero_advantage: bool = True
    """Leave out groups whose rewards are all equal (their gradient is zero)."""


class OptimizerSection(Section):
    """``[optimizer]``: AdamW."""

    lr: float = Field(1e-6, gt=0)
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.95, ge=0, lt=1)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    grad_clip: float = Field(1.0, gt=0)
    """Largest global gradient norm."""
    warmup_steps: int = Field(0, ge=0)


class TrainSection(Section):
    """``[train]``: one Megatron replica per training node."""

    tp: int = Field(1, ge=1)
    pp: int = Field(1, ge=1)
    micro_tokens: int = Field(8192, ge=64)
    """Most tokens of one packed micro-batch."""
    recompute: bool = False
    """Compute every layer's forward pass a second time in the backward pass instead of keeping its activations: a third more work, a fraction of the
    memory.  ``components.split = "auto"`` chooses it where it is not given."""
    threads: int = Field(1, ge=1)
    """CPU threads per worker process."""
    snapshot_every: int = Field(4, ge=0)
    """Steps between in-memory snapshots (/dev/shm) that rebuild a killed worker when no live peer has the state; the steps since are replayed on their
    kept batches.  0: never, the checkpoint is used."""


class CheckpointSection(Section):
    """``[checkpoint]``: what survives the job."""

    every: int = Field(50, ge=0)
    """Steps between checkpoints; 0: only at the end."""
    keep: int = Field(2, ge=1)
    """Most recent checkpoints kept."""
    experience: bool = True
    """Finished trajectories outlive a stop, a crash and a new start of the ranks, in files of the run directory: about 9 bytes a token, for up to
    2 (eta + 1) batches.  Those cut off in mid-course are drawn again, so that up to eta + 1 batches lean towards short ones; ``false``: all are."""
