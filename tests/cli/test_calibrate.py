"""`libra-hpc calibrate` makes a file for `simulate` from the steps of a run; mistakes are one sentence."""

from __future__ import annotations

import json
import random
from pathlib import Path

import msgspec
import pytest
from libra_hpc_cli.app import run

from libra_hpc.engine.steplog import StepLogHeader
from libra_hpc.models.devices import device
from libra_hpc.models.step_times.measured import MAX_POINTS, load
from libra_hpc.traces.generate import Dials, generate
from libra_hpc.traces.read import write_trace

BASE, SEQUENCE, KV, PREFILL = 4e-3, 2e-4, 3e-8, 5e-5


def write_log(path: Path, tp: int, kv_tokens: int, count: int = 400) -> None:
    """Steps that follow a known model, twice as fast at twice the degree."""
    rng = random.Random(tp)
    header = StepLogHeader(tp=tp, kv_tokens=kv_tokens, block_size=32, max_num_seqs=64, max_num_batched_tokens=2048)
    lines = [msgspec.json.encode(header)]
    for _ in range(count):
        decodes, prefill = rng.randint(1, 48), rng.choice([0, 0, rng.randint(1, 512)])
        kv = decodes * rng.randint(100, 2000)
        seconds = (BASE + SEQUENCE * decodes + KV * kv + PREFILL * prefill) / tp
        lines.append(msgspec.json.encode((decodes, kv, prefill, 0, seconds)))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"\n".join(lines) + b"\n")


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "demo-001"
    for number, (tp, kv_tokens) in enumerate([(1, 600_000), (1, 500_000), (2, 1_200_000)]):
        write_log(folder / "logs" / "attempt-1" / f"r2.{number}.steps.jsonl", tp, kv_tokens)
    (folder / "config.json").write_text(json.dumps({"model": {"path": "/models/Tiny-1B"}}))
    return folder


def calibrate(*arguments: object) -> int:
    return run(["calibrate", "engine", *map(str, arguments)])


def test_a_run_becomes_a_calibration_that_simulate_takes(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "steps.json"
    assert calibrate(out, "--run", recorded, "--name", "a800", "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["device"], answer["model"]) == ("a800", "Tiny-1B")
    for tp, capacity in (("1", 500_000), ("2", 1_200_000)):
        fit = answer["degrees"][tp]["fit"]
        assert answer["degrees"][tp]["kv_capacity"] == capacity
        assert [fit["base"], fit["per_sequence"], fit["per_prefill"]] == pytest.approx(
            [x / int(tp) for x in (BASE, SEQUENCE, PREFILL)], rel=1e-3
        )
    trace = tmp_path / "trace.jsonl"
    write_trace(trace, generate("search", Dials(trajectories=16, seed=1)))
    fleet = ["--device", "a800", "--model", "tiny-1b", "--buckets", "2xTP1,1xTP2"]
    simulated = ["simulate", str(trace), "--calibration", str(out), *fleet]
    assert run([*simulated, "--policy", "least_loaded", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["source"].startswith("measured: ")
    assert calibrate(out, "--run", recorded, "--name", "h200") == 2
    assert "device = 'h200'" in capsys.readouterr().err


def test_the_hosts_work_goes_into_a_device_file(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (recorded / "config.json").write_text(json.dumps({"model": {"path": "/models/qwen3-4b"}}))
    out, file = tmp_path / "steps.json", tmp_path / "devices.toml"
    asked = (out, "--run", recorded, "--devices", file)
    assert calibrate(*asked, "--name", "h900") == 2
    assert "device = 'h900'" in capsys.readouterr().err
    assert not out.exists()
    assert calibrate(*asked, "--name", "h200") == 0
    assert 0.0 < device("h200", file).host_sequence_s < SEQUENCE


def test_other_degrees_stay_and_a_long_run_is_thinned(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "steps.json"
    assert calibrate(out, "--run", "demo-001", "--runs", recorded.parent) == 0
    table = capsys.readouterr().out
    assert "1,200 steps of Tiny-1B on cpu" in table
    assert f"--calibration {out} --device cpu --model Tiny-1B" in " ".join(table.split())
    other = tmp_path / "other" / "demo-002"
    write_log(other / "logs" / "attempt-1" / "r2.0.steps.jsonl", 4, 9_000_000, count=2 * MAX_POINTS + 1)
    (other / "config.json").write_bytes((recorded / "config.json").read_bytes())
    assert calibrate(out, "--run", other) == 0
    found = load(out)
    assert set(found.kv_capacity) == {1, 2, 4}
    thinned = [point for point in found.points if point.tp == 4]
    assert MAX_POINTS // 2 < len(thinned) <= MAX_POINTS
    assert sum(point.tp < 4 for point in found.points) == 1200


@pytest.mark.usefixtures("few_batches")
def test_plan_takes_the_measured_degrees(recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (recorded / "config.json").write_text(json.dumps({"model": {"path": "/models/qwen3-8b"}}))
    out, file = tmp_path / "steps.json", tmp_path / "run.toml"
    assert calibrate(out, "--run", recorded, "--name", "a800") == 0
    file.write_text("[rollout]\nmax_model_len = 16384\n")
    options = "-o planner.model=qwen3-8b -o planner.device=a800 --gpus 32 --best 1 --json"
    plan = ["plan", str(file), *options.split()]
    capsys.readouterr()
    batches = []
    for more in ([], ["--calibration", str(out)]):
        assert run([*plan, *more]) == 0
        batches.append(json.loads(capsys.readouterr().out)["plans"][0])
    assert batches[0] != batches[1]


def test_mistakes_in_files(recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert calibrate(tmp_path / "none" / "out.json", "--run", recorded) == 2
    assert "no such folder" in capsys.readouterr().err
    for log in recorded.glob("logs/*/*"):
        log.unlink()
    assert calibrate(tmp_path / "out.json", "--run", recorded) == 2
    assert "rollout.record_steps = true" in capsys.readouterr().err
