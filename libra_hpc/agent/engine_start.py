"""What a rollout engine is started with: its settings, and the weights it begins with."""

from __future__ import annotations

from pathlib import Path

from libra_hpc.engine.settings import EngineConfig
from libra_hpc.mesh.agent_context import AgentContext
from libra_hpc.state.attempt import saved_point
from libra_hpc.state.state_folders import POLICY_DIR


def engine_config(context: AgentContext, name: str, tp: int, image: Path | None, version: int) -> EngineConfig:
    """Settings of engine ``name``; ``image`` is that of this node, if it has a version.  Reads the run directory."""
    config = context.config
    step, model = _saved_policy(context)
    return EngineConfig(
        run=config.changed(model={"path": model}),
        component=context.component,
        seed=(config.run.seed * 100_003 + context.rank * 101 + context.attempt + 1_000_003 * step) % 2**31,
        tp=tp,
        step_log=str(context.logs / f"{name}.steps.jsonl") if config.rollout.record_steps else "",
        version=step if image is None else version,
        weights="" if image is None else str(image),
        gate=context.gate,
    )


def _saved_policy(context: AgentContext) -> tuple[int, str]:
    """Step and folder of the policy to begin with: of the resume point, or the newest when that checkpoint is gone."""
    point = context.resume_point
    if point.checkpoint and not Path(point.checkpoint).is_dir():
        # Another cluster has none, and begins with the model.
        point = saved_point(context.run)
    # A snapshot has no policy: the engine gets the newest weights from the trainers, before it serves.
    step = point.saved_step if point.snapshot else point.step
    return step, str(Path(point.checkpoint) / POLICY_DIR) if point.checkpoint else context.config.model.path
