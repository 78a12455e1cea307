"""The check of a GPU machine: its steps one by one, its table, what it measures by itself, and its run's records."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest
from msgspec.json import encode
from msgspec.structs import replace

import bench.gpu.__main__ as check
import bench.gpu.pieces as pieces
from bench.gpu.setting import SMALLER, TINY, Figure, Figures, Setting, core_memory, listed_name
from bench.gpu.steps import LARGEST_GAP, show
from libra_hpc.errors import OperationError, UserError
from libra_hpc.models.devices import device
from libra_hpc.models.memory import memory_limit
from tests.stage.waiting import alive

SETTING = Setting(device="cpu", seconds=60.0)
HALF = Figure("half, s", 1.5)


def run(tmp_path: Path, script: str, seconds: float = 60.0) -> check.Outcome:
    """A step that is a shell script, which has written one figure, and a torn one, before it begins."""
    (tmp_path / "odd.jsonl").write_bytes(encode(HALF) + b'\n{"what": "to')
    return check.run("odd", replace(SETTING, seconds=seconds), ["bash", "-c", script], tmp_path, leave_s=0.5)


def test_a_step_that_fails_leaves_its_figures_and_its_reason(tmp_path: Path) -> None:
    outcome = run(tmp_path, "echo first; echo the GPU fell off >&2; exit 1")
    assert (outcome.state, outcome.reason, outcome.figures) == ("failed", "the GPU fell off", [HALF])


def test_a_late_step_is_ended_with_its_processes_and_leaves_its_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "LEAST_S", 1.0)
    outcome = run(tmp_path, f"trap '' TERM; sleep 600 & echo $! > {tmp_path}/pid; wait", seconds=1.5)
    assert (outcome.state, outcome.figures) == ("late", [HALF])
    assert "did not end within 2 s" in outcome.reason
    beside, patience = int((tmp_path / "pid").read_text()), time.monotonic() + 30.0
    # A killed process takes a moment to end.
    while alive(beside):
        assert time.monotonic() < patience, "a process of the step is left"
        time.sleep(0.02)


def test_without_time_a_step_is_left_out(tmp_path: Path) -> None:
    assert run(tmp_path, "exit 1", seconds=check.LEAST_S - 1.0).state == "left out"


def test_the_command_goes_on_after_a_failure_and_leaves_table_figures_and_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check, "STEPS", {"gone": ("steps", 30.0), "facts": ("steps", 30.0)})
    assert check.main(["--device", "cpu", "--json", str(tmp_path / "x.json")]) == 1
    gone, facts = json.loads((tmp_path / "x.json").read_text())["raw"]
    assert (gone["state"], facts["state"]) == ("failed", "passed")
    assert "'gone' is unknown" in gone["reason"]
    assert {"what": "model of the measurements", "measured": "tiny", "predicted": None} in facts["figures"]
    assert "'gone' is unknown" in (tmp_path / "x.log").read_text()
    assert "model of the measurements" in capsys.readouterr().out


def test_the_table_has_ratios_where_something_was_predicted() -> None:
    figures = [Figure("step, s", 3.0, 2.0), Figure("GPU", "NVIDIA H200")]
    rows = check.lines([check.Outcome("training", "failed", 7.0, figures)])
    assert [row[-1] for row in rows] == [None, "1.50", ""]


@pytest.mark.parametrize(("reported", "name"), [("NVIDIA H200", "h200"), ("NVIDIA A100-SXM4-80GB", "a100")])
def test_the_drivers_name_finds_the_device(reported: str, name: str) -> None:
    assert listed_name(reported) == name


def test_an_unlisted_device_is_refused_with_the_ways_out() -> None:
    with pytest.raises(UserError, match=r"--gpu = 'NVIDIA L4': the device table has no such GPU; .*--devices"):
        listed_name("NVIDIA L4")


def test_the_largest_model_that_fits_is_measured() -> None:
    setting = Setting(device="cuda", seconds=1.0)
    assert setting.shape(device("h200")).name == "qwen3-4b"
    assert setting.shape(device("a800")) == SMALLER[0]
    with pytest.raises(UserError, match=r"--model = 'qwen3-8b': training has no room, .* GB over"):
        replace(setting, model="qwen3-8b").shape(device("a800"))
    assert memory_limit(core_memory(TINY, SETTING.hardware(), max(SETTING.sizes.packs)), SETTING.hardware()) is None


def test_a_run_is_right_only_with_all_steps_close_probabilities_and_new_weights(tmp_path: Path) -> None:
    times = {"step_s": 1.0, "train_wall_s": 1.0, "diff_s": 1.0, "gen_tokens": 8, "t": 0.0}
    metrics = [{"step": step, "version": step, "logprob_gap": 0.01, **times} for step in (1, 2, 3)]
    events = [{"kind": "weights_applied", "version": 2, "t": 1.5, "pause_s": 0.5}]
    figures = Figures(tmp_path / "f")
    show(metrics, events, 3, figures)
    assert Figure("  commit until the engine has the weights, s", 1.5) in figures.read()
    apart = [*metrics[:2], {**metrics[2], "logprob_gap": LARGEST_GAP}]
    for wrong, seen, why in (
        (metrics[:2], events, "2 steps of 3"),
        (apart, events, "differ by 0.1"),
        (metrics, [], "version -1 after 3"),
    ):
        with pytest.raises(OperationError, match=why):
            show(wrong, seen, 3, figures)


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<...cutlass::bfloat16_t...>", "attention"),
        ("nvjet_hsh_256x128_64x4_1x2_h_bz_coopA_NTN", "products"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>", "elementwise"),
        ("Memset (Device)", "elementwise"),
    ],
)
def test_a_kernels_name_has_its_kind(kernel: str, kind: str) -> None:
    assert next(one for one, name in pieces.KERNELS.items() if name.search(kernel)) == kind


def test_each_lever_has_a_row_beside_its_plain_form(tmp_path: Path) -> None:
    figures = Figures(tmp_path / "f")
    bench = pieces.Bench(pieces.choose_device("cpu", 0, 1), SETTING.hardware(), figures)
    dense, mixture = pieces.GRIDS["cpu"][0]
    pieces.experts(bench, mixture, 64)
    pieces.head(bench, dense, 32)
    pieces.attention(bench, replace(dense, layers=1), [32, 32])
    pieces.elementwise(bench, dense, 64)
    assert all(figure.measured > 0 and figure.predicted > 0 for figure in figures.read())
    plain = re.compile("plain|one by one|padded blocks|added afterwards")
    names = {figure.what for figure in figures.read()}
    levers = [name for name in names if plain.search(name)]
    assert {plain.sub("the trainer's choice", name) for name in levers} <= names
    assert len(levers) == 3 + 2 + 2 + 1
