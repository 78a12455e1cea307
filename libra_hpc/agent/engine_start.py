"""What a rollout engine is started with: its settings, and the weights it begins with."""

from __future__ import annotations

from pathlib import Path

from libra_hpc.engine.settings import EngineConfig, config_for_run
from libra_hpc.mesh.agent_context import AgentContext
from libra_hpc.state.attempt import start_state
from libra_hpc.state.state_folders import POLICY_DIR
from libra_hpc.weights.flow import WeightFile


def engine_config(context: AgentContext, name: str, tp: int, newest: WeightFile | None) -> EngineConfig:
    """Settings of engine ``name``; ``newest`` is the newest weight file of this node.  Reads the run directory."""
    config = context.config
    step, model = _saved_policy(context)
    return config_for_run(
        config,
        model=model,
        seed=(config.run.seed * 100_003 + context.rank * 101 + context.attempt + 1_000_003 * step) % 2**31,
        tp=tp,
        step_log=str(context.logs / f"{name}.steps.jsonl") if config.rollout.record_steps else "",
        version=step if newest is None else newest.version,
        weights="" if newest is None else str(newest.path),
    )


def _saved_policy(context: AgentContext) -> tuple[int, str]:
    """Step and folder of the policy to begin with: the start's, or the newest one when that checkpoint is gone."""
    start = context.start
    if start.checkpoint and not Path(start.checkpoint).is_dir() and (newest := start_state(context.run)).checkpoint:
        return newest.step, str(Path(newest.checkpoint) / POLICY_DIR)
    # A snapshot has no policy: the engine gets the newest weights from the trainers, before it serves.
    step = start.saved_step if start.snapshot else start.step
    return step, str(Path(start.checkpoint) / POLICY_DIR) if start.checkpoint else context.config.model.path
