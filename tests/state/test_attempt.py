"""Where an attempt starts when checkpoints are damaged or cannot be read, and what its metrics are made of."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from libra_hpc.config.run import RunConfig
from libra_hpc.errors import OperationError
from libra_hpc.facts.rundir import RunDir, read_lines
from libra_hpc.process import retry
from libra_hpc.protocol.layout import ResumePoint
from libra_hpc.state import state_folders as folders
from libra_hpc.state import store
from libra_hpc.state.attempt import BEGINNING, Event, complete_checkpoint, newest_point, remove_old, saved_point

from .saved import WEIGHTS, checkpoint, flip, unreadable


@pytest.fixture(autouse=True)
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "AGAIN_S", 0.01)


def start(run: RunDir, attempt: int = 1, from_step: int | None = None) -> tuple[ResumePoint, list[Event]]:
    return newest_point(run, RunConfig(), attempt, core=(1,), parts=((), ()), from_step=from_step)


def at(run: RunDir, step: int) -> ResumePoint:
    return ResumePoint(step, str(run.checkpoint(step)), 8 * step, (8 * step + 3,))


def names(run: RunDir) -> list[str]:
    return sorted(path.name for path in run.checkpoints.iterdir())


def steps(run: RunDir) -> list[int]:
    return [line["step"] for line in read_lines(run.metrics)]


def trained(run: RunDir, last: int) -> None:
    run.metrics.write_text("".join(json.dumps({"t": 1.0, "step": step}) + "\n" for step in range(1, last + 1)))


def test_the_newest_whole_checkpoint_is_taken_and_damaged_ones_are_moved_aside(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert start(run) == (BEGINNING, [])
    folder = {step: checkpoint(run, step) for step in (10, 20, 30, 40, 50)}
    (folder[50] / folders.POSITION_FILE).write_text('{"step": 50, ')
    folder[40].rename(run.checkpoint(41))
    flip(folder[30] / "optimizer.safetensors")
    (run.checkpoints / f"step-000060{folders.TEMPORARY}").mkdir()
    assert saved_point(run).step == 30, "the quick answer reads no weights, and moves nothing"
    assert folder[50].exists()
    welcome, events = start(run)
    assert welcome == at(run, 20)
    assert [(kind, fields["step"]) for kind, fields in events] == [
        ("checkpoint_damaged", step) for step in (50, 41, 30)
    ]
    for (_, fields), word in zip(events, ("state.json has", "step 40", "optimizer.safetensors"), strict=True):
        assert word in fields["reason"]
    assert names(run) == [
        "step-000010",
        "step-000020",
        "step-000030.damaged",
        "step-000041.damaged",
        "step-000050.damaged",
    ]
    assert run.latest_checkpoint() == (20, folder[20])
    assert start(run) == (welcome, [])


def test_without_any_whole_state_a_start_is_refused_and_nothing_is_touched(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    trained(run, 20)
    for step in (10, 20):
        flip(checkpoint(run, step) / WEIGHTS)
    for _ in range(2):
        with pytest.raises(OperationError, match=r"No state of .* is whole.*--from-step 0.*has not the checksum"):
            start(run)
        assert (names(run), steps(run)[-1]) == (["step-000010", "step-000020"], 20)
    assert start(run, 2, from_step=0)[0] == BEGINNING
    assert (names(run), steps(run)) == (["step-000010.aside-2", "step-000020.aside-2"], [])
    assert start(run, 2, from_step=0)[0] == BEGINNING, "a restart of the attempt that asked for it"
    with pytest.raises(OperationError, match="has others"):
        start(run, 3)


def test_a_run_that_was_saved_before_its_first_step_goes_on_from_there(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    checkpoint(run, 0)
    assert start(run) == (at(run, 0), [])


def test_checkpoints_that_are_gone_are_missed(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.events.write_text('{"t": 1.0, "kind": "checkpoint_saved", "step": 5}\n')
    with pytest.raises(OperationError, match="has lost the checkpoints that were saved"):
        start(run)


@pytest.mark.parametrize("name", [folders.MANIFEST_FILE, folders.POSITION_FILE, WEIGHTS])
@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.EMFILE, errno.ENOMEM, errno.EACCES])
def test_a_checkpoint_that_cannot_be_read_once_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, number: int
) -> None:
    run = RunDir(tmp_path)
    checkpoint(run, 10)
    newest = checkpoint(run, 20)
    trained(run, 25)
    monkeypatch.setattr(retry.time, "sleep", lambda seconds: None)
    failed = unreadable(monkeypatch, newest / name, 2, number)
    welcome, events = start(run)
    assert (welcome, len(failed)) == (at(run, 20), 2)
    ((kind, fields),) = events
    assert (kind, fields["part"]) == ("storage_fault", "checkpoints")
    assert f"{newest / name} cannot be read: Stale file handle" in fields["reason"]
    assert (names(run), steps(run)[-1]) == (["step-000010", "step-000020"], 20)


def test_a_checkpoint_that_stays_unreadable_ends_the_start_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir(tmp_path)
    flip(checkpoint(run, 30) / WEIGHTS)
    newest = checkpoint(run, 20)
    trained(run, 35)
    now = [0.0]
    monkeypatch.setattr(retry.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(retry.time, "sleep", lambda seconds: now.append(now.pop() + seconds))
    unreadable(monkeypatch, newest / WEIGHTS, 10_000)
    with pytest.raises(OperationError) as caught:
        start(run)
    how = f"continue with `libra-hpc submit --resume {run.name}`"
    sentence = f"{newest / WEIGHTS} cannot be read: Stale file handle, for 900 s; the start was given up; {how}"
    assert str(caught.value) == sentence
    assert now == [900.0], "deadlines.storage_s"
    assert (names(run), steps(run)[-1]) == (["step-000020", "step-000030"], 35)


def test_a_start_that_waits_for_a_full_disk_names_the_write_and_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir(tmp_path)
    checkpoint(run, 20)
    trained(run, 25)
    waits, left = list[str](), [errno.ENOSPC, errno.ENOSPC, errno.EIO]
    replace = Path.replace

    def full(path: Path, target: Path) -> Path:
        if left:
            raise OSError(number := left.pop(0), os.strerror(number))  # a write names no file
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", full)
    monkeypatch.setattr(retry.time, "sleep", lambda seconds: None)
    welcome, events = newest_point(run, RunConfig(), 1, core=(1,), parts=((), ()), waits_for=waits.append)
    assert welcome == at(run, 20)
    again = "it is tried again for 900 s"
    full_disk = f"{run.metrics} cannot be written: No space left on device; {again}"
    assert waits == [full_disk] * 2 + [f"{run.metrics} cannot be written: Input/output error; {again}"]
    assert [fields["reason"] for _, fields in events] == [full_disk, waits[2]], "each once"


def test_an_attempt_begins_once_at_the_step_that_its_user_chose(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    for step in (10, 20, 30):
        checkpoint(run, step)
    trained(run, 30)
    flip(run.checkpoint(10) / WEIGHTS)
    for step, word in ((15, "no such checkpoint"), (10, "has not the checksum")):
        with pytest.raises(OperationError, match=f"--from-step {step}: .*{word}"):
            start(run, 2, from_step=step)
    assert start(run, 2, from_step=20)[0] == at(run, 20)
    assert (names(run), steps(run)[-1]) == (["step-000010", "step-000020", "step-000030.aside-2"], 20)
    checkpoint(run, 30)
    assert start(run, 2, from_step=20)[0] == at(run, 30), "a restart goes on from what it saved since"
    assert start(run, 3)[0] == at(run, 30)


def test_steps_whose_lines_were_lost_with_the_coordinator_come_from_the_checkpoint_once_each(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    reports = tuple(folders.StepRecord(step, 100.0 + step, {"loss": 0.25, "reward": None}) for step in (3, 4, 5, 6))
    checkpoint(run, 6, *reports)
    # The coordinator was killed while it wrote step 5; the line of step 7 is of a step that is trained again.
    written: list[dict[str, Any]] = [
        {"t": float(step), "step": step, "loss": 0.5, "rollout_nodes": 1} for step in (1, 2, 3, 4, 7)
    ]
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in written) + '{"t": 5.0, "step": 5, "lo')
    start(run)
    lines = list(read_lines(run.metrics))
    assert lines[:4] == written[:4]
    assert lines[4:] == [{"t": 105.0, "step": 5, "loss": 0.25}, {"t": 106.0, "step": 6, "loss": 0.25}]
    start(run)
    assert list(read_lines(run.metrics)) == lines


def test_metrics_that_were_never_written_come_from_the_checkpoint(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    start(run)
    assert not run.metrics.exists()
    checkpoint(run, 2, folders.StepRecord(1, 1.0, {}), folders.StepRecord(2, 2.0, {}))
    start(run)
    assert steps(run) == [1, 2]


def test_steps_of_a_run_that_never_saved_are_trained_again(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    trained(run, 7)
    assert start(run) == (BEGINNING, [])
    assert steps(run) == []


def test_a_state_without_room_for_its_position_is_removed_and_a_complete_one_never(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir(tmp_path)
    folder = {step: checkpoint(run, step) for step in (10, 30)}

    def written(step: int) -> tuple[Path, folders.Manifest]:
        partial = run.checkpoints / f"step-{step}.start.1.partial"
        partial.mkdir()
        state = partial / folders.STATE_FILE
        state.write_bytes(msgspec.json.encode(folders.TrainerState(step, 99)))
        return partial, folders.seal(partial, [state])

    def full(folder: Path, paths: object) -> folders.Manifest:
        raise OSError("no room")

    with monkeypatch.context() as patched:
        partial, manifest = written(20)
        patched.setattr(folders, "seal", full)
        with pytest.raises(OSError, match="no room"):
            complete_checkpoint(partial, run.checkpoint(20), manifest, folders.DataPosition(20, 160, ()))
    partial, manifest = written(30)
    complete_checkpoint(partial, run.checkpoint(30), manifest, folders.DataPosition(30, 240, ()))
    assert folders.read_state(folder[30]).updates == 30, "it is not replaced"
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["step-000010", "step-000030"]
    partial, manifest = written(40)
    complete_checkpoint(partial, run.checkpoint(40), manifest, folders.DataPosition(40, 320, ()))
    assert not folders.verify(run.checkpoint(40))
    assert saved_point(run).step == 40
    remove_old(run, 1, good_step=39)
    assert sorted(run.checkpoints.iterdir()) == [run.checkpoint(30), run.checkpoint(40)]
    remove_old(run, 2, good_step=5)
    assert sorted(run.checkpoints.iterdir()) == [run.checkpoint(30), run.checkpoint(40)], "none is as old"
    means = [(20, 0.2), (30, 0.9), (35, 0.9), (40, 0.1)]
    lines = [{"task": "held", "step": step, "mean": mean} for step, mean in means]
    run.evaluations.write_text("".join(json.dumps(line) + "\n" for line in [*lines, {"task": "held", "step": 45}]))
    remove_old(run, 1, best="held")
    assert sorted(run.checkpoints.iterdir()) == [run.checkpoint(30), run.checkpoint(40)], "the best of an evaluation"
    remove_old(run, 1, best="other")
    assert list(run.checkpoints.iterdir()) == [run.checkpoint(40)]


@pytest.mark.parametrize("name", [WEIGHTS, folders.MANIFEST_FILE, folders.POSITION_FILE, "trainer.json"])
@pytest.mark.parametrize("stale", ["missing", "short"])
def test_a_file_that_a_stale_cache_hides_costs_a_pause_and_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, stale: str
) -> None:
    run, pauses = RunDir(tmp_path), list[float]()
    checkpoint(run, 10)
    path = checkpoint(run, 20) / name
    whole = path.read_bytes()
    path.write_bytes(whole[:4])
    if stale == "missing":
        path.unlink()

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            path.write_bytes(whole)

    monkeypatch.setattr(store, "AGAIN_S", 60.0)
    monkeypatch.setattr(store.time, "sleep", sleep)
    assert start(run) == (at(run, 20), [])
    assert pauses == [0.5, 1.0, 2.0]
    assert names(run) == ["step-000010", "step-000020"]
