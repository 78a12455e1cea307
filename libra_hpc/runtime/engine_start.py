"""What a rollout engine is started with: its settings, and the weights it begins with."""

from __future__ import annotations

from pathlib import Path

from libra_hpc.rollout.engine.settings import EngineConfig
from libra_hpc.train.state_folders import POLICY_DIR
from libra_hpc.weights.flow import WeightFile

from .agent_context import AgentContext


def engine_config(context: AgentContext, name: str, tp: int, newest: WeightFile | None) -> EngineConfig:
    """Settings of engine ``name``; ``newest`` is the newest weight file of this node.  Reads the run directory."""
    rollout, run = context.config.rollout, context.config.run
    step, model = _saved_policy(context)
    return EngineConfig(
        model=model,
        dtype=context.config.model.dtype,
        tp=tp,
        max_model_len=rollout.max_model_len,
        max_num_seqs=rollout.max_num_seqs,
        kv_cache_mb=rollout.kv_cache_mb,
        block_size=rollout.block_size,
        threads=rollout.threads,
        seed=(run.seed * 100_003 + context.rank * 101 + context.attempt + 1_000_003 * step) % 2**31,
        device=context.config.slurm.device,
        step_log=str(context.logs / f"{name}.steps.jsonl") if rollout.record_steps else "",
        version=step if newest is None else newest.version,
        weights="" if newest is None else str(newest.path),
    )


def _saved_policy(context: AgentContext) -> tuple[int, str]:
    """Step and folder of the policy to begin with: the start's, or the newest one when that checkpoint is gone."""
    start = context.start
    if (
        start.checkpoint
        and not Path(start.checkpoint).is_dir()
        and (saved := context.run.latest_checkpoint()) is not None
    ):
        return saved[0], str(saved[1] / POLICY_DIR)
    return start.step, str(Path(start.checkpoint) / POLICY_DIR) if start.checkpoint else context.config.model.path
