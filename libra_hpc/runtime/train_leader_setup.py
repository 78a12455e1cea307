"""The surroundings of the train leader in its agent: rendezvous folders, and what completes a checkpoint."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Sequence
from pathlib import Path

from libra_hpc.protocol import mesh as wire
from libra_hpc.telemetry.rundir import RunDir
from libra_hpc.train import state_folders as folders
from libra_hpc.train.train_leader import DataOrder, TrainLeader

from .agent_context import AgentContext
from .attempt import complete_checkpoint, remove_old


def clear_rendezvous(run: RunDir) -> None:
    """For rank 0, before any other starts: a start that was killed leaves files that must not be met again."""
    shutil.rmtree(run.rendezvous, ignore_errors=True)


def rendezvous_folder(context: AgentContext) -> Path:
    """The folder of rendezvous files of this start, the same for all its nodes."""
    folder = context.run.rendezvous / f"attempt-{context.attempt}-{context.start.pid}"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def make_train_leader(context: AgentContext, rendezvous: Path) -> TrainLeader:
    """The train leader of this start, which completes checkpoints in the run directory."""
    config, start, run = context.config, context.start, context.run
    run.checkpoints.mkdir(exist_ok=True)

    async def saved(step: int, order: DataOrder, reports: Sequence[wire.StepReport]) -> None:
        records = tuple(folders.StepRecord(r.step, r.t, dict(r.metrics.columns())) for r in reports)
        position = folders.DataPosition(step, order.low, tuple(sorted(order.extra)), records)
        # A shared file system may take a minute for any of this, and the agent's loop has heartbeats to send.
        await asyncio.to_thread(complete_checkpoint, run.checkpoint(step), position)
        asyncio.get_running_loop().run_in_executor(None, remove_old, run, config.checkpoint.keep)

    return TrainLeader(
        config,
        context.layout.core,
        start.step,
        DataOrder(start.low, start.extra),
        send=context.send,
        rollout_leader=context.layout.rollout_leader,
        receivers=lambda: context.receivers,
        saved=saved,
        rendezvous=rendezvous,
        checkpoints=run.checkpoints,
    )
