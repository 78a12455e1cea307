"""Whether all ranks restart from a snapshot in shared memory that is newer than the newest checkpoint.

- A snapshot is complete -> its entry in the run directory has its data position and the trainers' layout.
- A restart, also in another job -> every node lists the parts it has (`libra_hpc.mesh.world`).
- The part of every node of the core exists on some node -> rank 0 takes the snapshot, and who lacks its part gets it.
- Another layout, or a part is gone -> the checkpoint.

After the loss of a node the ranks may be on other nodes than before, so a part may be anywhere.

What was trained after the snapshot is trained again, as after a checkpoint: the start has one step and one data
position, and metrics and recovery log go by those.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Sequence

import msgspec

from libra_hpc.config.run import RunConfig
from libra_hpc.facts.rundir import RunDir
from libra_hpc.protocol.layout import ResumePoint

from .state_folders import TEMPORARY, DataPosition, publish, read_position
from .store import NewestWhole, SavedState, checkpoint_damage, newest_whole, states

OTHER_LAYOUT = "it is of another layout."


def layout_digest(config: RunConfig) -> str:
    """Return a digest of all keys about training: a change of one more costs a few steps, once."""
    keys = msgspec.json.encode((config.train, config.components.train, config.model, config.lora))
    return hashlib.sha256(keys).hexdigest()


def list_snapshot(run: RunDir, config: RunConfig, name: str, position: DataPosition) -> None:
    """List a snapshot instead of the one before; raises `OSError`."""
    partial = run.snapshots / f"{name}{TEMPORARY}"
    for path in (run.snapshots, partial):
        path.mkdir(exist_ok=True)
    publish(partial, run.snapshots / name, position=msgspec.structs.replace(position, layout=layout_digest(config)))
    keep_listed(run, name)


def keep_listed(run: RunDir, name: str) -> None:
    """List this snapshot alone; the steps of any other are trained again."""
    for state in states(run.snapshots):
        if state.folder.name != name:
            shutil.rmtree(state.folder, ignore_errors=True)


def restore_from(name: str, core: Sequence[int], parts: Sequence[Sequence[str]]) -> tuple[dict[int, int], str]:
    """Nodes without their part of a snapshot -> who has it; and a sentence when a part is gone."""
    found = {}
    for rank in core:
        holders = [node for node, there in enumerate(parts) if f"{rank}/{name}" in there]
        if not holders:
            return {}, f"no node has the part of node {rank} of snapshot {name} whole."
        if rank not in holders:
            found[rank] = holders[0]
    return found, ""


def newer_snapshot(
    run: RunDir, config: RunConfig, *, point: ResumePoint, core: Sequence[int], parts: Sequence[Sequence[str]]
) -> tuple[ResumePoint, NewestWhole]:
    """``point``, from a checkpoint, or a newer one from a snapshot; ``parts``: parts of every rank's node."""

    def why_not(state: SavedState) -> str:
        if why := checkpoint_damage(state):
            return why
        if read_position(state.folder).layout != layout_digest(config):
            return OTHER_LAYOUT
        return restore_from(state.folder.name, core, parts)[1]

    found = newest_whole((state for state in states(run.snapshots) if state.step > point.step), why_not)
    if found.whole is None:
        return point, found
    at, name = read_position(found.whole.folder), found.whole.folder.name
    restore, _ = restore_from(name, core, parts)
    snapshot = msgspec.structs.replace(
        point, step=at.step, low=at.low, extra=at.extra, snapshot=name, saved_step=point.step, restore=restore
    )
    return snapshot, found
