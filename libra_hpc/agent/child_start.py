"""What the child processes of a node are started with: command lines, settings, and the state they begin with.

- `child_command` alone distinguishes a dry run (``run.engine = "simulated"``) from a real one.
- All nodes of the core form one world. A world of one node meets in the agent's private folder, else on the shared
  file system.
- A hybrid node is a world of its own without a state, or several are one: it gets weights when it joins.
- A core of one node is rebuilt -> it begins with the newest whole snapshot or checkpoint. Several nodes begin with what
  rank 0 has chosen for all.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from libra_hpc.config.node_groups import core_world, elastic_world
from libra_hpc.config.run import RunConfig
from libra_hpc.engine.settings import EngineConfig
from libra_hpc.mesh.agent_context import AgentContext
from libra_hpc.process.retry import patiently
from libra_hpc.state.attempt import saved_point
from libra_hpc.state.state_folders import POLICY_DIR
from libra_hpc.state.store import NewestWhole, newest_whole, states
from libra_hpc.train_leader.train_leader_setup import rendezvous_folder
from libra_hpc.trainer.settings import WorkerConfig

MODULES = {
    "engine": ("libra_hpc.engine", "libra_hpc.simulated.engine_process"),
    "trainer": ("libra_hpc.trainer.worker", "libra_hpc.simulated.trainer_process"),
    "host": ("libra_hpc.host.host", "libra_hpc.simulated.host_process"),
}
"""Modules by kind: in a real run, and in a dry one."""


def child_command(config: RunConfig, kind: str, settings: Path) -> list[str]:
    """A child of a kind of `MODULES`; ``settings``: the file with its configuration."""
    real, dry = MODULES[kind]
    return [sys.executable, "-m", real if config.run.engine == "real" else dry, "--config", str(settings)]


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


log = logging.getLogger("libra_hpc.agent")


def worker_configs(context: AgentContext, number: int, common: int = 0) -> list[WorkerConfig]:
    """Settings of every process of this node's start ``number``, from 0; reads and writes the run directory.

    ``common``: number of the start that the nodes of a replica make together.
    """
    config, layout = context.config, context.layout
    core, unit = layout.core, layout.unit(context.rank)
    elastic = context.rank not in core
    world = elastic_world(config) if elastic else core_world(config)
    start_dir, first = "", 0
    rendezvous = context.private / f"world-{number}"
    if elastic and len(unit) > 1:
        first = unit.index(context.rank) * world.processes
        rendezvous = rendezvous_folder(context) / f"replica-{unit[0]}.{common}"
    elif not elastic:
        start_dir, own = context.resume_point.checkpoint, context.snapshots / str(context.rank)
        if context.resume_point.snapshot:
            start_dir = str(own / context.resume_point.snapshot)
        if len(core) == 1:
            start_dir = _newest(context, own, start_dir) if number else start_dir
        else:
            first = core.index(context.rank) * world.processes
            rendezvous = rendezvous_folder(context) / "core"
    return [
        WorkerConfig(
            run=config,
            world_rendezvous=str(rendezvous),
            start_dir=start_dir,
            device_index=local_rank,
            elastic=elastic,
            rank=first + local_rank,
        )
        for local_rank in range(world.processes)
    ]


def _newest(context: AgentContext, snapshots: Path, started: str) -> str:
    """The newest of what the attempt started from, whole snapshots, and whole checkpoints; raises `OSError`."""

    def read() -> NewestWhole:
        found = (*states(snapshots), *states(context.run.checkpoints))
        return newest_whole(state for state in found if state.step >= context.resume_point.step)

    newest = patiently(read, context.config.deadlines.storage_s)
    for state, why in newest.damaged:
        log.warning("%s is passed over: %s", state.folder, why)
    return started if newest.whole is None else str(newest.whole.folder)
