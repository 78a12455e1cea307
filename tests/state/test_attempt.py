"""Where an attempt starts when checkpoints are damaged, and what its metrics are made of."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from libra_hpc.facts.rundir import RunDir, read_lines
from libra_hpc.protocol.agents import Welcome
from libra_hpc.state import state_folders as folders
from libra_hpc.state.attempt import complete_checkpoint, drop_steps_after, remove_old, start_state, whole_start_state


def save(run: RunDir, step: int, reports: tuple[folders.StepRecord, ...] = ()) -> Path:
    folder = run.checkpoint(step)
    partial = folder.with_name(f"{folder.name}{folders.TEMPORARY}")
    partial.mkdir(parents=True)
    (partial / "optimizer.safetensors").write_bytes(b"moments")
    (partial / folders.STATE_FILE).write_bytes(msgspec.json.encode(folders.TrainerState(step, step)))
    folders.publish(partial, folder)
    (folder / folders.POSITION_FILE).write_bytes(
        msgspec.json.encode(folders.DataPosition(step, 8 * step, (8 * step + 3,), reports))
    )
    return folder


def test_the_newest_whole_checkpoint_is_taken_and_damaged_ones_are_moved_aside(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert whole_start_state(run) == (Welcome(0, "", 0, ()), [])
    folder = {step: save(run, step) for step in (10, 20, 30, 40, 50)}
    (folder[50] / folders.POSITION_FILE).write_text('{"step": 50, ')
    (folder[40] / folders.POSITION_FILE).write_text('{"step": 39, "low": 0, "extra": []}')
    (folder[30] / "optimizer.safetensors").write_bytes(b"mements")
    (run.checkpoints / f"step-000060{folders.TEMPORARY}").mkdir()
    assert start_state(run).step == 30, "the quick answer reads no weights, and moves nothing"
    assert folder[50].exists()
    welcome, damaged = whole_start_state(run)
    assert welcome == Welcome(20, str(folder[20]), 160, (163,))
    assert [step for step, _ in damaged] == [50, 40, 30]
    assert [
        word in sentence
        for (_, sentence), word in zip(damaged, ("torn", "step 39", "optimizer.safetensors"), strict=True)
    ] == [True] * 3
    assert sorted(path.name for path in run.checkpoints.iterdir()) == [
        "step-000010",
        "step-000020",
        "step-000030.damaged",
        "step-000040.damaged",
        "step-000050.damaged",
    ]
    assert run.latest_checkpoint() == (20, folder[20])
    assert whole_start_state(run) == (welcome, [])


def test_a_checkpoint_of_an_older_version_is_taken_as_it_is(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    (save(run, 10) / folders.MANIFEST_FILE).unlink()
    assert whole_start_state(run) == (Welcome(10, str(run.checkpoint(10)), 80, (83,)), [])


def test_steps_whose_lines_were_lost_with_the_coordinator_come_from_the_checkpoint_once_each(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    reports = tuple(folders.StepRecord(step, 100.0 + step, {"loss": 0.25, "reward": None}) for step in (3, 4, 5, 6))
    save(run, 6, reports)
    # The coordinator was killed while it wrote step 5; the line of step 7 is of a step that is trained again.
    written = [{"t": float(step), "step": step, "loss": 0.5, "rollout_nodes": 1} for step in (1, 2, 3, 4, 7)]
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in written) + '{"t": 5.0, "step": 5, "lo')
    drop_steps_after(run, 6)
    lines = list(read_lines(run.metrics))
    assert lines[:4] == written[:4]
    assert lines[4:] == [{"t": 105.0, "step": 5, "loss": 0.25}, {"t": 106.0, "step": 6, "loss": 0.25}]
    drop_steps_after(run, 6)
    assert list(read_lines(run.metrics)) == lines


def test_metrics_that_were_never_written_come_from_the_checkpoint(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    drop_steps_after(run, 0)
    assert not run.metrics.exists()
    save(run, 2, (folders.StepRecord(1, 1.0, {}), folders.StepRecord(2, 2.0, {})))
    drop_steps_after(run, 2)
    assert [line["step"] for line in read_lines(run.metrics)] == [1, 2]


def test_a_state_without_room_for_its_position_is_removed_and_a_complete_one_never(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir(tmp_path)
    folder = {step: save(run, step) for step in (10, 30)}

    def written(step: int) -> tuple[Path, folders.Manifest]:
        partial = run.checkpoints / f"step-{step}.start.1.partial"
        partial.mkdir()
        state = partial / folders.STATE_FILE
        state.write_bytes(msgspec.json.encode(folders.TrainerState(step, 99)))
        return partial, folders.seal(partial, [state])

    def full(folder: Path, position: folders.DataPosition) -> None:
        raise OSError("no room")

    with monkeypatch.context() as patched:
        patched.setattr(folders, "write_position", full)
        partial, manifest = written(20)
        with pytest.raises(OSError, match="no room"):
            complete_checkpoint(partial, run.checkpoint(20), manifest, folders.DataPosition(20, 160, ()))
    partial, manifest = written(30)
    complete_checkpoint(partial, run.checkpoint(30), manifest, folders.DataPosition(30, 240, ()))
    assert folders.read_state(folder[30]).updates == 30, "it is not replaced"
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["step-000010", "step-000030"]
    partial, manifest = written(40)
    complete_checkpoint(partial, run.checkpoint(40), manifest, folders.DataPosition(40, 320, ()))
    assert not folders.verify(run.checkpoint(40))
    assert start_state(run).step == 40
    remove_old(run, 1)
    assert list(run.checkpoints.iterdir()) == [run.checkpoint(40)]
