"""The surroundings of the train leader in its agent: rendezvous folders, and what completes a checkpoint."""

from __future__ import annotations

import asyncio
import shutil
from functools import partial
from pathlib import Path

from libra_hpc.mesh.agent_context import AgentContext
from libra_hpc.protocol.agents import ToReplica
from libra_hpc.protocol.trainer import KeepState, Tier
from libra_hpc.state import state_folders as folders
from libra_hpc.state.attempt import complete_checkpoint, list_snapshot, remove_old
from libra_hpc.state.state_folders import DataOrder

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

    tier: Tier = "checkpoint"

    def __init__(self, context: AgentContext) -> None:
        self._context, self._run = context, context.run

    def folder(self, step: int, number: int) -> str:
        name = f"step-{step:06d}.{self._context.start_name}.{number}{folders.TEMPORARY}"
        return str(self._run.checkpoints / name)

    async def complete(self, folder: str, manifest: folders.Manifest, position: folders.DataPosition) -> None:
        """Make it the checkpoint of its step; older ones are removed later."""
        if taken := await asyncio.to_thread(self._context.fence.check):
            raise OSError(taken)
        final = self._run.checkpoint(position.step)
        await asyncio.to_thread(complete_checkpoint, Path(folder), final, manifest, position)
        settings, good_step = self._context.config.checkpoint, self._context.good_step
        remove = partial(remove_old, self._run, settings.keep, good_step, settings.best)
        asyncio.get_running_loop().run_in_executor(None, remove)

    async def discard(self, folder: str) -> None:
        """Remove what was written."""
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)


class SnapshotStore:
    """Snapshots: parts on the nodes, and in the run directory an entry of the newest complete one."""

    tier: Tier = "snapshot"

    def __init__(self, context: AgentContext) -> None:
        self._context, point = context, context.resume_point
        self._nodes = sorted({*context.layout.core, *point.restore.values()})
        """The core, and nodes that had parts of the first one for others."""
        self._complete = point.step if point.snapshot else -1

    def folder(self, step: int, number: int) -> str:
        return f"step-{step:08d}.{self._context.start_name}.{number}"

    async def complete(self, folder: str, manifest: folders.Manifest, position: folders.DataPosition) -> None:
        """List it, and no other one."""
        dropped, context = folder, self._context
        try:
            await asyncio.to_thread(list_snapshot, context.run, context.config, folder, position)
            self._complete, dropped = position.step, ""
        finally:
            await self.discard(dropped)

    async def discard(self, folder: str) -> None:
        """Have the nodes remove this snapshot, and earlier ones than the newest."""
        for rank in self._nodes:
            self._context.send(rank, ToReplica(KeepState(self._complete, folder)))


def make_train_leader(context: AgentContext, rendezvous: Path) -> TrainLeader:
    """The train leader of this start, which completes checkpoints in the run directory."""
    config, point, run = context.config, context.resume_point, context.run
    run.checkpoints.mkdir(exist_ok=True)
    leader = TrainLeader(
        config,
        context.layout.core,
        point.step,
        DataOrder(point.low, point.extra),
        send=context.send,
        rollout_leader=context.layout.rollout_leader,
        receivers=lambda: context.receivers,
        stores=(CheckpointStore(context), SnapshotStore(context)),
        rendezvous=rendezvous,
        begins="snapshot" if point.snapshot else "checkpoint" if point.checkpoint else None,
        fence=context.fence,
    )
    leader.changed = context.changed
    return leader
