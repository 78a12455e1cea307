"""The surroundings of the train leader in its agent: rendezvous folders, and what completes a checkpoint."""

from __future__ import annotations

import asyncio
import shutil
from functools import partial
from pathlib import Path

from libra_hpc.mesh.agent_context import AgentContext
from libra_hpc.state import state_folders as folders
from libra_hpc.state.attempt import complete_checkpoint, remove_old
from libra_hpc.state.data_order import DataOrder
from libra_hpc.state.snapshot_start import list_snapshot

from .train_leader import TrainLeader


def rendezvous_folder(context: AgentContext) -> Path:
    """The folder of rendezvous files of this start, the same for all its nodes."""
    folder = context.run.rendezvous / context.start_name
    for path in (folder.parent, folder):
        path.mkdir(exist_ok=True)
    return folder


class CheckpointStore:
    """Checkpoints in the run directory.

    All in threads: a shared file system may take a minute, and the agent's loop has heartbeats to send.
    """

    def __init__(self, context: AgentContext) -> None:
        self._context, self._run = context, context.run

    async def complete(self, folder: Path, manifest: folders.Manifest, position: folders.DataPosition) -> None:
        """Make it the checkpoint of its step; older ones are removed later."""
        if taken := await asyncio.to_thread(self._context.fence.check):
            raise OSError(taken)
        await asyncio.to_thread(complete_checkpoint, folder, self._run.checkpoint(position.step), manifest, position)
        settings, good_step = self._context.config.checkpoint, self._context.good_step
        remove = partial(remove_old, self._run, settings.keep, good_step, settings.best)
        asyncio.get_running_loop().run_in_executor(None, remove)

    async def discard(self, folder: Path) -> None:
        """Remove what was written."""
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)


class SnapshotList:
    """Complete snapshots, in the run directory."""

    def __init__(self, context: AgentContext) -> None:
        self._context = context

    async def add(self, position: folders.DataPosition) -> None:
        """List it, and no other one."""
        await asyncio.to_thread(
            list_snapshot, self._context.run, self._context.config, self._context.start_name, position
        )


def make_train_leader(context: AgentContext, rendezvous: Path) -> TrainLeader:
    """The train leader of this start, which completes checkpoints in the run directory."""
    config, point, run = context.config, context.resume_point, context.run
    run.checkpoints.mkdir(exist_ok=True)
    return TrainLeader(
        config,
        context.layout.core,
        point.step,
        DataOrder(point.low, point.extra),
        send=context.send,
        rollout_leader=context.layout.rollout_leader,
        receivers=lambda: context.receivers,
        store=CheckpointStore(context),
        rendezvous=rendezvous,
        checkpoints=run.checkpoints,
        index=SnapshotList(context),
        from_checkpoint=bool(point.checkpoint) and not point.snapshot,
        from_snapshot=bool(point.snapshot),
        part_holders=point.restore.values(),
        fence=context.fence,
    )
