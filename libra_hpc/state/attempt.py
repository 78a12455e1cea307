"""Where an attempt starts, and the policy it leaves: what rank 0 reads and writes in the run directory at both ends.

- The newest whole checkpoint, or a newer snapshot -> the attempt goes on from it; what was done after that is done
  again and must not count twice: the start has one step and one data position.
- A snapshot in shared memory is listed in the run directory with its data position and the trainers' layout.  Every
  node lists the parts it has: after the loss of a node they may be anywhere, and who lacks its part gets it.
- Another layout, or a part is gone -> the checkpoint.
- No whole state, though one was saved -> refused; step 0 then needs ``--from-step 0``.
- ``--from-step N`` -> that checkpoint; newer ones are moved aside, at the first start of the attempt.
- A file cannot be read -> waited for, up to ``deadlines.storage_s``; then nothing has been changed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from libra_hpc.config.run import RunConfig
from libra_hpc.errors import OperationError
from libra_hpc.facts.rundir import RunDir, read_lines
from libra_hpc.files import complete_folder, write_atomic
from libra_hpc.process.retry import cannot, patiently
from libra_hpc.protocol.layout import ResumePoint

from . import state_folders as folders
from .state_folders import TEMPORARY, DataPosition, publish, read_position
from .store import NewestWhole, SavedState, checkpoint_damage, newest_until, newest_whole, position_damage, states

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


log = logging.getLogger("libra_hpc.state")
BEGINNING = ResumePoint(0, "", 0, ())
Event = tuple[str, dict[str, Any]]
"""Kind and fields of an event that rank 0 logs once it can."""


class _Resumption(NamedTuple):
    """What was decided; nothing of it is carried out yet."""

    welcome: ResumePoint
    aside: dict[Path, Path]
    """Checkpoints to rename."""
    events: list[Event] = []
    metrics: bytes | None = None
    """New content of ``metrics.jsonl``; None: it stays."""


def source_of(point: ResumePoint) -> str:
    """From which step an attempt goes on and why, as the end of a sentence."""
    if point.snapshot:
        older = f"the checkpoint of step {point.saved_step}" if point.checkpoint else "any checkpoint"
        return f"from step {point.step}, whose snapshot in shared memory is newer than {older}"
    if point.checkpoint:
        return f"from step {point.step}, the newest checkpoint"
    return "from the beginning"


def metrics_until(run: RunDir, point: ResumePoint) -> bytes | None:
    """The metrics of the state that this attempt starts from, one line for every step up to it; None: as they are.

    - A line of a later step -> dropped, because the step is trained again.
    - An earlier step without a line, because the coordinator ended too early -> its line comes from that state.
    """
    lines: dict[int, dict[str, Any]] = {}
    for line in read_lines(run.metrics):
        if line.get("step", 0) <= point.step:
            lines.setdefault(line.get("step", 0), line)
    state = run.snapshots / point.snapshot if point.snapshot else Path(point.checkpoint)
    for record in folders.read_position(state).reports if point.step else ():
        if record.step <= point.step:
            known = {name: value for name, value in record.metrics.items() if value is not None}
            lines.setdefault(record.step, {"t": record.t, "step": record.step, **known})
    content = b"".join(json.dumps(lines[each]).encode() + b"\n" for each in sorted(lines))
    return None if content == (run.metrics.read_bytes() if run.metrics.exists() else b"") else content


def copy_policy(source: Path, destination: Path) -> None:
    partial = destination.with_name(f".{destination.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(source, partial)
    complete_folder(partial, destination)


def saved_point(run: RunDir) -> ResumePoint:
    """The newest checkpoint, or the beginning, by data positions alone; raises `OSError`."""
    return _welcome(newest_whole(states(run.checkpoints), position_damage).whole)


def newest_point(
    run: RunDir,
    config: RunConfig,
    attempt: int,
    *,
    core: Sequence[int],
    parts: Sequence[Sequence[str]],
    from_step: int | None = None,
    waits_for: Callable[[str], object] = log.warning,
) -> tuple[ResumePoint, list[Event]]:
    """Where an attempt starts, and what is to be logged; ``parts``: the parts of snapshots on every rank's node.

    ``waits_for`` gets what cannot be read or written, before each pause. For rank 0 alone, before anybody writes; takes
    minutes for large checkpoints. Raises `OperationError`.
    """
    waits: list[Event] = []

    def note(sentence: str) -> None:
        waits_for(sentence)
        if (event := _event("storage_fault", part="checkpoints", reason=sentence)) not in waits:
            waits.append(event)

    def decide() -> _Resumption:
        asked = _from_step(run, attempt, from_step)
        base = asked or _newest_checkpoint(run)
        point, found = base.welcome, NewestWhole(None, [])
        if asked is None:
            point, found = newer_snapshot(run, config, point=point, core=core, parts=parts)
        resumes = point.checkpoint or point.snapshot
        if not resumes and from_step != 0 and (why := _saved_before(run)):
            damaged = "; ".join(str(fields["reason"]) for _, fields in base.events)
            again = f"`libra-hpc submit --resume {run.name} --from-step 0` starts from the beginning"
            raise OperationError(f"No state of {run.name} is whole, and {why}; {again}. {damaged}".rstrip())
        passed = [_event("snapshot_failed", step=s.step, reason=why) for s, why in found.damaged if why != OTHER_LAYOUT]
        return base._replace(welcome=point, events=[*base.events, *passed], metrics=metrics_until(run, point))

    longest_s, words = config.deadlines.storage_s, cannot
    try:
        chosen = patiently(decide, longest_s, note)
        words = partial(cannot, operation="written")
        patiently(lambda: _carry_out(run, attempt, chosen, from_step), longest_s, note, words=words)
    except OSError as error:
        how = f"the start was given up; continue with `libra-hpc submit --resume {run.name}`"
        raise OperationError(f"{words(error)}, for {longest_s:.0f} s; {how}") from error
    return chosen.welcome, [*waits, *chosen.events]


def _event(kind: str, **fields: Any) -> Event:
    return kind, fields


def _newest_checkpoint(run: RunDir) -> _Resumption:
    found = newest_whole(states(run.checkpoints), checkpoint_damage)
    aside = {s.folder: s.folder.with_name(f"{s.folder.name}.damaged") for s, _ in found.damaged}
    events = [
        _event("checkpoint_damaged", step=s.step, reason=f"checkpoint {s.folder.name} is damaged: {why}")
        for s, why in found.damaged
    ]
    return _Resumption(_welcome(found.whole), aside, events)


def _from_step(run: RunDir, attempt: int, step: int | None) -> _Resumption | None:
    """The state of the step that the user chose; None: there is none, or this attempt began with it already."""
    if step is None or run.from_step(attempt).exists():
        return None
    found = states(run.checkpoints)
    chosen = next((state for state in found if state.step == step), None)
    if step:
        why = "there is no such checkpoint." if chosen is None else checkpoint_damage(chosen)
        if why:
            raise OperationError(f"--from-step {step}: {why}")
    newer = [state.folder for state in found if state.step > step]
    return _Resumption(
        _welcome(chosen), {folder: folder.with_name(f"{folder.name}.aside-{attempt}") for folder in newer}
    )


def _saved_before(run: RunDir) -> str:
    """Why an attempt must not start at step 0 unasked; empty: nothing was ever saved."""
    there = os.listdir(run.checkpoints) if run.checkpoints.exists() else []
    if any(name.startswith("step-") and not name.endswith(folders.TEMPORARY) for name in there):
        return f"{run.checkpoints} has others"
    saved = any(event["kind"] == "checkpoint_saved" for event in read_lines(run.events))
    return f"{run.checkpoints} has lost the checkpoints that were saved" if saved else ""


def _carry_out(run: RunDir, attempt: int, chosen: _Resumption, from_step: int | None) -> None:
    for left in run.checkpoints.glob(f"*{folders.TEMPORARY}"):
        shutil.rmtree(left, ignore_errors=True)
    for folder, aside in chosen.aside.items():
        if folder.exists():
            complete_folder(folder, aside)
    keep_listed(run, chosen.welcome.snapshot)
    if chosen.metrics is not None:
        write_atomic(run.metrics, chosen.metrics)
    if from_step is not None:
        run.from_step(attempt).parent.mkdir(parents=True, exist_ok=True)
        run.from_step(attempt).touch()


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
        folders.publish(written, folder, manifest, position)
    except OSError:
        shutil.rmtree(written, ignore_errors=True)
        raise


def remove_old(run: RunDir, keep: int, good_step: int = -1, best: str = "") -> None:
    """Remove all checkpoints but the newest ``keep``, and the newest one up to each step that is spared.

    These are ``good_step``, and that of the best mean of the evaluation ``best``.
    """
    # The next checkpoint comes here again.
    with contextlib.suppress(OSError):
        found = states(run.checkpoints)
        spared = [newest_until(found, step) for step in (good_step, best_step(run, best))]
        for state in found[keep:]:
            if state not in spared:
                shutil.rmtree(state.folder, ignore_errors=True)


def best_step(run: RunDir, evaluation: str) -> int:
    """Step of the weights with the best mean of an evaluation, the first of several; -1 without one."""
    lines = [line for line in read_lines(run.evaluations) if line.get("task") == evaluation and "mean" in line]
    return int(max(lines, key=lambda line: line["mean"])["step"]) if lines else -1


def _welcome(state: SavedState | None) -> ResumePoint:
    if state is None:
        return BEGINNING
    position = folders.read_position(state.folder)
    return ResumePoint(position.step, str(state.folder), position.low, position.extra)
