"""Every reader of foreign bytes meets JSON nested too deeply for a decoder: a clean error, or one line skipped."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from cli.runs import read_status
from libra_hpc.config.load import load_resolved, load_run_file, parse_override, validate
from libra_hpc.engine.settings import read_config
from libra_hpc.engine.steplog import read_steps
from libra_hpc.errors import UserError
from libra_hpc.facts.rundir import RunDir, read_lines
from libra_hpc.facts.status import decode_status
from libra_hpc.models.architecture import read_shape
from libra_hpc.models.devices import _read as read_devices
from libra_hpc.models.shapes import model_shape
from libra_hpc.models.step_times import measured
from libra_hpc.models.step_times.tables import load_table
from libra_hpc.preflight.named_files import read_model_config
from libra_hpc.protocol.agents import mesh
from libra_hpc.protocol.codec import FrameError
from libra_hpc.protocol.engine import to_engine
from libra_hpc.rollout.trajectory import records
from libra_hpc.slurm.queue.job_record import read_job
from libra_hpc.tasks.tool_outcome import classify
from libra_hpc.traces.read import read_trace

DEPTHS = (1000, 100_000)
"""Just beyond the interpreter's limit, and far beyond it."""


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


@pytest.mark.parametrize("union", [mesh, to_engine])
@pytest.mark.parametrize(
    "frame", [b"\x91" * 100_000 + b"\xc0", b"\x82\xa4type\xa5Abort\xa1x" + b"\x91" * 100_000 + b"\xc0"]
)
def test_a_nested_frame_is_a_frame_error(union: object, frame: bytes) -> None:
    with pytest.raises(FrameError):
        union.decode(frame)  # type: ignore[attr-defined]


def model_config(path: Path) -> object:
    for name in ("model.safetensors", "tokenizer.json"):
        (path.parent / name).write_bytes(b"")
    return read_model_config(validate({"model": {"path": str(path.parent)}}))


FILES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "run file": ("run.toml", load_run_file),
    "configuration of a run": ("run.json", load_resolved),
    "device file": ("devices.toml", read_devices),
    "calibration": ("calibration.json", measured.load),
    "operator table": ("table.json", load_table),
    "shape of a model": ("config.json", model_shape),
    "shape to train": ("config.json", lambda path: read_shape(path.parent)),
    "policy": ("config.json", model_config),
    "engine configuration": ("engine.json", read_config),
    "step log": ("steps.jsonl", read_steps),
    "job": ("job.json", lambda path: read_job(RunDir(path.parent))),
    "trace": ("trace.jsonl", read_trace),
}


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("name", FILES)
def test_a_nested_file_is_a_mistake_of_the_user(name: str, depth: int, tmp_path: Path) -> None:
    file, read = FILES[name]
    path = tmp_path / file
    path.write_text(f"turns = {nested(depth)}\n" if path.suffix == ".toml" else f'{{"turns":{nested(depth)}}}\n')
    with pytest.raises(UserError):
        read(path)


def test_a_configuration_that_decodes_and_is_too_deep_to_check_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    for depth in range(900, 1000):
        path.write_text(f'{{"turns":{nested(depth)}}}')
        with pytest.raises(UserError):
            load_resolved(path)


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_nested_override_is_refused_and_a_nested_text_is_text(depth: int, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("")
    with pytest.raises(UserError):
        load_run_file(path, [f"algorithm.eta={nested(depth)}"])
    assert parse_override(f"run.name={nested(depth)}")[1] == nested(depth)


@pytest.mark.parametrize("depth", DEPTHS)
def test_nested_lines_are_passed_over(depth: int, tmp_path: Path) -> None:
    good = {"prompt_id": "p", "sample": 0, "prompt_tokens": 4, "turns": [{"new_tokens": 0, "gen_tokens": 5}]}
    path = tmp_path / "trajectories.jsonl"
    path.write_text(f'{{"turns":{nested(depth)}}}\n{json.dumps(good)}\n')
    assert len(list(records(path))) == 1
    assert [line["prompt_id"] for line in read_lines(path) if "prompt_id" in line] == ["p"]
    trace = read_trace(path, skip_bad=True)
    assert (len(trace.trajectories), len(trace.bad)) == (1, 1)


def test_nested_documents_of_a_run_are_none(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    for path in (run.status, run.job):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(nested(100_000))
    assert run.read_json(run.job) == {}
    assert read_status(run) is None
    with pytest.raises(msgspec.DecodeError):
        decode_status(b'{"x":' + nested(100_000).encode() + b"}")


def test_a_tool_that_answers_with_nested_json_has_an_outcome_nonetheless() -> None:
    assert classify('{"a":' + nested(5000) + "}").outcome == "ok"
