"""Whether all ranks restart from a snapshot in shared memory that is newer than the newest checkpoint.

- A snapshot is complete -> a file of the run directory lists it, with its data position and the trainers' layout.
- A restart within the attempt -> every node says which parts it holds (`libra_hpc.mesh.world`).
- The part of every node of the core exists there, or as a copy at its successor -> rank 0 takes the snapshot.
- Another layout, another attempt, or a part is gone -> the checkpoint.

What was trained after the snapshot is trained again, as after a checkpoint: the start has one step and one data
position, and metrics and recovery log go by those.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import msgspec

from libra_hpc.config.run import RunConfig
from libra_hpc.facts.rundir import RunDir
from libra_hpc.files import write_atomic
from libra_hpc.protocol.agents import Welcome

from .snapshot_keeper import COPIES, OWN
from .snapshots import holders
from .state_folders import DataPosition


class ListedSnapshot(msgspec.Struct, frozen=True):
    """A complete snapshot."""

    layout: str
    """Digest of what decides which process owns what."""
    position: DataPosition


def layout_digest(config: RunConfig) -> str:
    """Of all keys about training: a change of one more costs a few steps, once."""
    keys = (config.train.model_dump_json(), config.components.train.model_dump_json(), config.model.model_dump_json())
    return hashlib.sha256("\n".join(keys).encode()).hexdigest()


def list_snapshot(run: RunDir, config: RunConfig, start: str, position: DataPosition) -> None:
    """List a snapshot of this start instead of the one before; raises `OSError`."""
    path = run.snapshots / f"step-{position.step:08d}.{start}.json"
    path.parent.mkdir(exist_ok=True)
    write_atomic(path, msgspec.json.encode(ListedSnapshot(layout_digest(config), position)))
    for older in run.snapshots.glob("step-*.json"):
        if older != path:
            older.unlink(missing_ok=True)


def listed(run: RunDir, name: str) -> ListedSnapshot | None:
    """What is listed under a name; None when that cannot be read."""
    try:
        return msgspec.json.decode((run.snapshots / f"{name}.json").read_bytes(), type=ListedSnapshot)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None


def restore_from(name: str, core: Sequence[int], held: Sequence[Sequence[str]]) -> dict[int, int] | None:
    """Nodes without their part of a snapshot -> who has a copy; None when a part is gone."""
    copies, found = holders(core), {}
    for rank in core:
        if f"{OWN}/{name}" not in held[rank]:
            holder = copies.get(rank, rank)
            if f"{COPIES}/{name}" not in held[holder]:
                return None
            found[rank] = holder
    return found


def newer_snapshot(
    run: RunDir, config: RunConfig, attempt: int, *, start: Welcome, core: Sequence[int], held: Sequence[Sequence[str]]
) -> Welcome:
    """``start``, from a checkpoint, or a newer one from a snapshot; ``held``: parts of every rank's node.

    Any other snapshot is listed no longer: its steps are trained again.
    """
    chosen = _chosen(run, config, attempt, start=start, core=core, held=held)
    for path in _files(run):
        if path.stem != chosen.snapshot:
            path.unlink(missing_ok=True)
    return chosen


def _chosen(
    run: RunDir, config: RunConfig, attempt: int, *, start: Welcome, core: Sequence[int], held: Sequence[Sequence[str]]
) -> Welcome:
    names = {path.stem for path in _files(run) if path.stem.partition(".")[2].startswith(f"attempt-{attempt}-")}
    for name in sorted(names, reverse=True):
        snapshot = listed(run, name)
        if snapshot is None or snapshot.layout != layout_digest(config) or snapshot.position.step <= start.step:
            continue
        restore = restore_from(name, core, held)
        if restore is not None:
            at = snapshot.position
            return msgspec.structs.replace(
                start, step=at.step, low=at.low, extra=at.extra, snapshot=name, saved_step=start.step, restore=restore
            )
    return start


def _files(run: RunDir) -> list[Path]:
    try:
        return list(run.snapshots.glob("step-*.json"))
    except OSError:
        return []
