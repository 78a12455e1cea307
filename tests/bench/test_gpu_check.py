"""The check of a GPU machine: its steps one by one, its table, what it measures by itself, and its run's records."""

from __future__ import annotations

import json
import time
from pathlib import Path

import msgspec
import pytest

import bench.gpu_check as check
from bench.gpu_check_run import LARGEST_GAP, RunRecords
from bench.gpu_check_steps import (
    MEASURES,
    SMALLER,
    TINY,
    Figure,
    Figures,
    Setting,
    core_memory,
    listed_name,
    measure_of,
)
from bench.gpu_check_switch import FIRST, HELD, LATER, show
from libra_hpc.errors import UserError
from libra_hpc.models.devices import device
from libra_hpc.models.memory import memory_limit
from tests.annexes.lend.test_lender import lives

SETTING = Setting(device="cpu", limit_s=60.0)


def run(tmp_path: Path, script: str, limit_s: float = 30.0, budget_s: float = 60.0) -> check.Outcome:
    """A step that is a shell script, which has written one figure before it begins."""
    line = msgspec.json.encode(Figure("half, s", 1.5)).decode()
    command = ["bash", "-c", f"echo '{line}' > {tmp_path}/odd.jsonl\n{script}"]
    runner = check.Runner(SETTING, tmp_path, budget_s, leave_s=0.5)
    return runner.run(check.Step("odd", "an odd step", limit_s), command)


def test_a_step_that_fails_leaves_its_figures_and_its_reason(tmp_path: Path) -> None:
    outcome = run(tmp_path, "echo first; echo the GPU fell off >&2; exit 1")
    assert (outcome.state, outcome.reason) == ("failed", "the GPU fell off")
    assert outcome.figures == [Figure("half, s", 1.5)]


def test_a_late_step_is_ended_with_its_processes_and_leaves_its_figures(tmp_path: Path) -> None:
    outcome = run(tmp_path, f"trap '' TERM; sleep 600 & echo $! > {tmp_path}/pid; wait", limit_s=1.5)
    assert outcome.state == "late"
    assert "did not end within 2 s" in outcome.reason
    assert outcome.figures == [Figure("half, s", 1.5)]
    beside, patience = int((tmp_path / "pid").read_text()), time.monotonic() + 30.0
    # A killed process takes a moment to end.
    while lives(beside):
        assert time.monotonic() < patience, "a process of the step is left"
        time.sleep(0.02)


def test_without_time_a_step_is_left_out(tmp_path: Path) -> None:
    outcome = run(tmp_path, "", budget_s=check.LEAST_S)
    assert outcome.state == "left out"
    assert not (tmp_path / "odd.jsonl").exists()


def test_a_torn_figure_is_not_read(tmp_path: Path) -> None:
    figures = Figures(tmp_path / "f")
    figures.add("whole", 1.0)
    with (tmp_path / "f").open("ab") as file:
        file.write(b'{"what": "to')
    assert [figure.what for figure in figures.read()] == ["whole"]


def test_the_command_goes_on_after_a_failure_and_prints_json_and_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = (check.Step("gone", "no such step", 30.0), check.Step("facts", "machine", 30.0))
    monkeypatch.setattr(check, "STEPS", steps)
    assert check.main(["--device", "cpu", "--out", str(tmp_path)]) == 1
    first, _, table = capsys.readouterr().out.partition("\n\n")
    gone, facts = json.loads(first)["steps"]
    assert gone["state"] == "failed"
    assert "invalid choice" in gone["reason"]
    assert facts["state"] == "passed"
    assert {"what": "model of the measurements", "measured": "tiny", "predicted": None} in facts["figures"]
    assert table == (tmp_path / "gpu_check.md").read_text()
    assert "invalid choice" in (tmp_path / "gpu_check.log").read_text()


def test_the_table_has_ratios_where_something_was_predicted() -> None:
    figures = [Figure("step, s", 3.0, 2.0), Figure("tokens/s", 12345.6), Figure("GPU", "NVIDIA H200")]
    outcome = check.Outcome("training", "training alone", "failed", 7.0, figures, "out of memory")
    lines = check.markdown([outcome]).splitlines()
    assert [cell.strip() for cell in lines[3].split("|")[1:-1]] == ["step, s", "3", "2", "1.50"]
    assert [cell.strip() for cell in lines[4].split("|")[1:-1]] == ["tokens/s", "12,346", "", ""]
    assert [cell.strip() for cell in lines[5].split("|")[1:-1]] == ["GPU", "NVIDIA H200", "", ""]
    assert len({len(line) for line in lines if line.startswith("|")}) == 1
    assert lines[-1].strip() == "training: failed after 7 s: out of memory"


def test_every_step_has_its_function() -> None:
    assert {step.name for step in check.STEPS} == set(MEASURES)
    assert callable(measure_of("facts"))


@pytest.mark.parametrize(
    ("reported", "name"),
    [("NVIDIA H200", "h200"), ("NVIDIA A100-SXM4-80GB", "a100"), ("NVIDIA A800-SXM4-80GB", "a800")],
)
def test_the_drivers_name_finds_the_device(reported: str, name: str) -> None:
    assert listed_name(reported) == name


def test_an_unlisted_device_is_refused_with_the_ways_out() -> None:
    with pytest.raises(
        UserError, match=r"--name = 'NVIDIA L4': the device table has no such GPU; valid: a100, .*--devices"
    ):
        listed_name("NVIDIA L4")


def test_the_largest_model_that_fits_is_measured() -> None:
    setting = Setting(device="cuda", limit_s=1.0)
    assert setting.shape(device("h200")).name == "qwen3-4b"
    assert setting.shape(device("a800")) == SMALLER[0]
    with pytest.raises(UserError, match=r"--model = 'qwen3-8b': training has no room, .* GB over"):
        msgspec.structs.replace(setting, model="qwen3-8b").shape(device("a800"))
    assert memory_limit(core_memory(TINY, SETTING.hardware(), max(SETTING.sizes.packs)), SETTING.hardware()) is None


def test_a_switch_shows_medians_and_the_first_step_over_a_later_one(tmp_path: Path) -> None:
    figures = Figures(tmp_path / "f")
    rounds = [{"switch to training, s": s, FIRST: 2.0 * s, LATER: s, HELD: 24.0} for s in (1.0, 3.0, 9.0)]
    show(rounds, predicted_bytes=24e9, figures=figures)
    found = {figure.what: figure for figure in figures.read()}
    assert [figure.measured for figure in found.values()] == [3.0, 2.0, 24.0]
    assert found[HELD].predicted == 24.0


def test_a_run_is_right_only_with_all_steps_close_probabilities_and_new_weights() -> None:
    metrics = [{"step": step, "logprob_gap": 0.01} for step in (1, 2, 3)]
    events = [{"kind": "weights_applied", "version": 2, "t": 1.0}]
    assert RunRecords(1.0, metrics, events).problem(3) == ""
    assert "2 steps of 3" in RunRecords(1.0, metrics[:2], events).problem(3)
    apart = [*metrics[:2], {"step": 3, "logprob_gap": LARGEST_GAP}]
    assert "differ by 0.1" in RunRecords(1.0, apart, events).problem(3)
    assert "version -1 after 3" in RunRecords(1.0, metrics, []).problem(3)
