"""Where an attempt starts, and the policy it leaves: what rank 0 reads and writes in the run directory at both ends.

An attempt goes on from the newest complete checkpoint, or from a newer snapshot (`snapshot_start`).  What was done
after that is done again and must not count twice.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from libra_hpc.config.run import RunConfig
from libra_hpc.facts.rundir import RunDir, read_lines
from libra_hpc.files import write_atomic
from libra_hpc.protocol.agents import Welcome

from . import state_folders as folders
from .snapshot_start import listed, newer_snapshot


def source_of(start: Welcome) -> str:
    """From which step a start goes on and why, as the end of a sentence."""
    if start.snapshot:
        older = f"the checkpoint of step {start.saved_step}" if start.checkpoint else "any checkpoint"
        return f"from step {start.step}, whose snapshot in shared memory is newer than {older}"
    if start.checkpoint:
        return f"from step {start.step}, the newest checkpoint"
    return "from the beginning"


def drop_steps_after(run: RunDir, step: int, snapshot: str = "") -> None:
    """Make the metrics those of the state that this attempt starts from: one line for every step up to it.

    ``snapshot``: name of the snapshot; empty: it is the checkpoint of the step.

    - A line of a later step -> dropped, because the step is trained again.
    - An earlier step without a line, because the coordinator ended too early -> its line comes from that state.
    """
    lines: dict[int, dict[str, Any]] = {}
    for line in read_lines(run.metrics):
        if line.get("step", 0) <= step:
            lines.setdefault(line.get("step", 0), line)
    for record in _reports(run, step, snapshot):
        if record.step <= step:
            known = {name: value for name, value in record.metrics.items() if value is not None}
            lines.setdefault(record.step, {"t": record.t, "step": record.step, **known})
    content = b"".join(json.dumps(lines[each]).encode() + b"\n" for each in sorted(lines))
    if content != (run.metrics.read_bytes() if run.metrics.exists() else b""):
        write_atomic(run.metrics, content)


def _reports(run: RunDir, step: int, snapshot: str) -> tuple[folders.StepRecord, ...]:
    if snapshot:
        found = listed(run, snapshot)
        return () if found is None else found.position.reports
    try:
        return folders.read_position(run.checkpoint(step)).reports
    except (OSError, ValueError):
        return ()


def copy_policy(source: Path, destination: Path) -> None:
    partial = destination.with_name(f".{destination.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(source, partial)
    shutil.rmtree(destination, ignore_errors=True)
    partial.rename(destination)


def start_state(run: RunDir) -> Welcome:
    """Where an attempt would start: the newest complete checkpoint, or the beginning.  Reads no weights."""
    for step, folder in reversed(run.complete_checkpoints()):
        position, _ = _position(step, folder)
        if position is not None:
            return _welcome(folder, position)
    return Welcome(0, "", 0, ())


def whole_start_state(run: RunDir) -> tuple[Welcome, list[tuple[int, str]]]:
    """Where an attempt starts: the newest checkpoint whose bytes are all as written, or the beginning.

    Moves newer, damaged ones aside and returns them as step and sentence.  For rank 0 alone, before anybody writes;
    takes minutes for large checkpoints.
    """
    damaged: list[tuple[int, str]] = []
    if run.checkpoints.exists():
        folders.remove_leftovers(run.checkpoints)
    for step, folder in reversed(run.complete_checkpoints()):
        position, why = _position(step, folder)
        if position is not None and not (why := folders.verify(folder)):
            return _welcome(folder, position), damaged
        aside = folder.with_name(f"{folder.name}{folders.DAMAGED}")
        shutil.rmtree(aside, ignore_errors=True)
        folder.rename(aside)
        damaged.append((step, f"checkpoint {folder.name} is damaged and was moved to {aside.name}: {why}"))
    return Welcome(0, "", 0, ()), damaged


def newest_start(
    run: RunDir, config: RunConfig, attempt: int, *, core: Sequence[int], held: Sequence[Sequence[str]]
) -> tuple[Welcome, list[tuple[int, str]]]:
    """As `whole_start_state`, or a newer snapshot; ``held``: the parts of snapshots on every rank's node."""
    start, damaged = whole_start_state(run)
    return newer_snapshot(run, config, attempt, start=start, core=core, held=held), damaged


def complete_checkpoint(
    written: Path, folder: Path, manifest: folders.Manifest, position: folders.DataPosition
) -> None:
    """Give a written state its data position and manifest, and rename it to ``folder``.

    Raises `OSError`, and the state is then removed, as where there is that checkpoint: a kill between the two renames
    of a replacement would leave the step without one.
    """
    with contextlib.suppress(OSError, ValueError):
        if folders.read_position(folder).step == position.step:
            shutil.rmtree(written, ignore_errors=True)
            return
    try:
        folders.write_position(written, position)
        folders.publish(written, folder, manifest)
    except OSError:
        shutil.rmtree(written, ignore_errors=True)
        raise


def remove_old(run: RunDir, keep: int) -> None:
    # The next checkpoint comes here again.
    with contextlib.suppress(OSError):
        for _, old in run.complete_checkpoints()[:-keep]:
            shutil.rmtree(old, ignore_errors=True)


def _position(step: int, folder: Path) -> tuple[folders.DataPosition | None, str]:
    try:
        position = folders.read_position(folder)
    except (OSError, ValueError) as error:
        return None, f"{error}."
    if position.step != step:
        return None, f"{folders.POSITION_FILE} is that of step {position.step}."
    return position, ""


def _welcome(folder: Path, position: folders.DataPosition) -> Welcome:
    return Welcome(position.step, str(folder), position.low, position.extra)
