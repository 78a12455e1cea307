"""What the Megatron processes of a node are started with: their place in a world, and the state they begin with.

- All nodes of the core form one world. A world of one node meets in the agent's private folder, else on the shared
  file system.
- A hybrid node is a world of its own without a state, or several are one: it gets weights when it joins.
- A core of one node is rebuilt -> it begins with the newest whole snapshot or checkpoint. Several nodes begin with what
  rank 0 has chosen for all.
"""

from __future__ import annotations

import logging
from pathlib import Path

from libra_hpc.config.node_groups import core_world, elastic_world
from libra_hpc.mesh.agent_context import AgentContext
from libra_hpc.process.retry import patiently
from libra_hpc.state.store import NewestWhole, newest_whole, states
from libra_hpc.train_leader.train_leader_setup import rendezvous_folder
from libra_hpc.trainer.settings import WorkerConfig

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
