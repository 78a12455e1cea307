"""From which state all ranks restart: the newest checkpoint, or a newer snapshot of which every part exists."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from libra_hpc.config.run import RunConfig
from libra_hpc.facts.rundir import RunDir, read_lines
from libra_hpc.protocol.mesh import Welcome
from libra_hpc.state.attempt import drop_steps_after, source_of
from libra_hpc.state.snapshot_start import list_snapshot, newer_snapshot
from libra_hpc.state.state_folders import DataPosition, StepRecord

CORE = (1, 2)
NAME = "step-00000012.attempt-1-7"
OWN, COPY = f"own/{NAME}", f"copies/{NAME}"
WHOLE = ((), (OWN, COPY), (OWN, COPY), ())
POSITION = DataPosition(12, 96, (98,), (StepRecord(11, 5.0, {"loss": 0.5}), StepRecord(12, 6.0, {"loss": 0.25})))


def config(**sections: Any) -> RunConfig:
    return RunConfig.model_validate({"train": {"snapshot_every": 2}, **sections})


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    found = RunDir(tmp_path)
    list_snapshot(found, config(), "attempt-1-7", POSITION)
    return found


def start(run: RunDir, held: tuple[tuple[str, ...], ...] = WHOLE, step: int = 10, **changes: Any) -> Welcome:
    checkpoint = Welcome(step, "/checkpoints/step", 8 * step, ())
    values: dict[str, Any] = {"config": config(), "attempt": 1, **changes}
    return newer_snapshot(run, values["config"], values["attempt"], start=checkpoint, core=CORE, held=held)


def test_a_newer_snapshot_is_taken_with_its_data_position(run: RunDir) -> None:
    found = start(run)
    assert found == Welcome(12, "/checkpoints/step", 96, (98,), snapshot=NAME, saved_step=10)
    assert source_of(found) == ("from step 12, whose snapshot in shared memory is newer than the checkpoint of step 10")
    assert start(run) == found, "it stays listed"


def test_a_part_that_was_lost_comes_from_the_node_that_has_a_copy(run: RunDir) -> None:
    assert start(run, ((), (), (OWN, COPY), ())).restore == {1: 2}
    assert start(run, ((), (COPY,), (OWN, COPY), ())).restore == {1: 2}


@pytest.mark.parametrize(
    ("held", "step", "changes"),
    [
        (((), (), (OWN,), ()), 10, {}),
        (((), (OWN,), (COPY,), ()), 10, {}),
        (
            ((), ("own/step-00000012.attempt-1-6",), (OWN, COPY), ()),
            10,
            {"attempt": 1, "config": config(train={"tp": 2})},
        ),
        (WHOLE, 12, {}),
        (WHOLE, 10, {"attempt": 2}),
        (WHOLE, 10, {"config": config(train={"tp": 2})}),
    ],
    ids=[
        "a part is gone",
        "the second part is gone",
        "no part",
        "the checkpoint is as new",
        "another attempt",
        "layout",
    ],
)
def test_otherwise_the_checkpoint_is_taken_and_the_snapshot_listed_no_longer(
    run: RunDir, held: tuple[tuple[str, ...], ...], step: int, changes: dict[str, Any]
) -> None:
    found = start(run, held, step, **changes)
    assert found == Welcome(step, "/checkpoints/step", 8 * step, ())
    assert source_of(found) == f"from step {step}, the newest checkpoint"
    assert not start(run, WHOLE).snapshot, "its steps were trained again"


def test_the_newest_snapshot_alone_is_listed_and_a_torn_file_is_none(run: RunDir) -> None:
    list_snapshot(run, config(), "attempt-1-8", msgspec.structs.replace(POSITION, step=14))
    (path,) = run.snapshots.iterdir()
    path.write_bytes(path.read_bytes()[:-4])
    assert not start(run).snapshot


def test_metrics_up_to_the_snapshot_stay_once_each_and_later_ones_go(run: RunDir) -> None:
    lines = [{"t": float(step), "step": step} for step in (*range(1, 12), 13, 14)]
    run.metrics.write_text("".join(f"{msgspec.json.encode(line).decode()}\n" for line in lines))
    drop_steps_after(run, 12, NAME)
    kept = list(read_lines(run.metrics))
    assert [line["step"] for line in kept] == list(range(1, 13))
    assert kept[10] == lines[10], "a line that was written wins"
    assert kept[11] == {"t": 6.0, "step": 12, "loss": 0.25}
