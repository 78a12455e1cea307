"""The parts that need no vLLM: configuration, request checks, answers, pacing of reports."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra_hpc.config.run import RunConfig
from libra_hpc.engine.settings import EngineConfig, alone, engine_arguments, environment, read_config, under_one_name
from libra_hpc.engine.stats import Pacer
from libra_hpc.engine.turns import NOT_FINITE, TurnInFlight, TurnRejected, read_prompt
from libra_hpc.errors import UserError
from libra_hpc.gate.gated_steps import GateConfig
from libra_hpc.protocol.codec import pack_i32, unpack_i32
from libra_hpc.protocol.engine import Generate


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"")
    return tmp_path


def config(device: str = "cpu", model: str = "qwen3-8b", **fields: Any) -> EngineConfig:
    """``fields``: of `EngineConfig`, and keys of ``[rollout]``."""
    place = {name: fields.pop(name) for name in EngineConfig.__struct_fields__ if name in fields}
    return alone(model, device, dtype="auto", rollout=fields, **place)


def written(folder: Path, model: str = "", **fields: object) -> Path:
    """``fields``: of `EngineConfig`; a dictionary is a section of the run's configuration."""
    values = msgspec.to_builtins(config(model=model or str(folder)))
    for name, value in fields.items():
        if isinstance(value, dict):
            values["run"][name] |= value
        else:
            values[name] = value
    path = folder / "engine.json"
    path.write_text(json.dumps(values))
    return path


def test_configuration_is_read_with_defaults(model: Path) -> None:
    found = read_config(written(model, tp=2, rollout={"kv_cache_mb": 3}))
    assert found == config(model=str(model), tp=2, kv_cache_mb=3)


def test_engines_of_all_checkpoints_have_one_key_of_compiled_graphs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM computes the key from its arguments; weights and seed have no part in it."""
    monkeypatch.chdir(tmp_path)
    arguments = []
    for step in ("100", "200", "200"):
        (tmp_path / step).mkdir(exist_ok=True)
        (tmp_path / step / "config.json").write_text(f'{{"step": {step}}}')
        named = under_one_name(config(model=str(tmp_path / step)), tmp_path / "engine")
        assert (Path(named.run.model.path) / "config.json").read_text() == f'{{"step": {step}}}'
        arguments.append(engine_arguments(named))
    assert arguments[0] == arguments[1]


def test_an_engine_has_the_values_of_the_run_file() -> None:
    sizes = {"max_model_len": 99, "max_num_seqs": 3, "kv_cache_mb": 5, "block_size": 16, "threads": 2}
    rollout = {**sizes, "kv_dtype": "fp8", "async_steps": True}
    run = RunConfig().changed(model={"path": "qwen3-8b", "dtype": "float32"}, rollout=rollout, slurm={"device": "cuda"})
    engine = EngineConfig(run=run, seed=7, tp=2)
    wanted = {
        "model": "qwen3-8b",
        "dtype": "float32",
        "seed": 7,
        "tensor_parallel_size": 2,
        "max_model_len": 99,
        "max_num_seqs": 3,
        "kv_cache_memory_bytes": 5 << 20,
        "block_size": 16,
        "kv_cache_dtype": "fp8",
        "async_scheduling": True,
    }
    assert engine_arguments(engine).items() >= wanted.items()
    assert environment(engine)["OMP_NUM_THREADS"] == "2"


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"tpp": 2}, ["tpp", "step_log"]),
        ({"tp": 0}, ["tp", ">= 1"]),
        ({"slurm": {"device": "tpu"}}, ["run.slurm.device", "tpu"]),
        ({"rollout": {"threads": "2"}}, ["run.rollout.threads", "int"]),
        ({"model": "/nowhere"}, ["model", "/nowhere", "config.json"]),
        ({"weights": "/nowhere.safetensors"}, ["weights", "/nowhere.safetensors"]),
    ],
)
def test_mistakes_in_the_configuration_are_named(model: Path, fields: dict[str, Any], names: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        read_config(written(model, **fields))
    assert all(name in str(caught.value) for name in names)


def test_a_folder_without_weights_and_an_absent_file_are_named(model: Path) -> None:
    (model / "model.safetensors").unlink()
    with pytest.raises(UserError, match="safetensors"):
        read_config(written(model))
    with pytest.raises(UserError, match="absent"):
        read_config(model / "absent.json")


def test_zero_kv_cache_is_left_to_vllm_and_a_weight_file_replaces_the_folders() -> None:
    assert engine_arguments(config())["kv_cache_memory_bytes"] is None
    assert engine_arguments(config())["load_format"] == "text_model"
    assert engine_arguments(config(kv_cache_mb=2, weights="w"))["kv_cache_memory_bytes"] == 2 << 20
    assert engine_arguments(config(weights="w"))["load_format"] == "dummy"


def test_devices_differ_in_graphs_sleep_steps_ahead_and_tokens_of_a_step_only() -> None:
    cpu, cuda = (engine_arguments(config(device=device)) for device in ("cpu", "cuda"))
    assert {key for key in cpu if cpu[key] != cuda[key]} == {
        *("async_scheduling", "cudagraph_capture_sizes", "enable_sleep_mode", "enforce_eager"),
        "max_num_batched_tokens",
    }
    assert "TORCHDYNAMO_DISABLE" not in environment(config(device="cuda"))


def test_steps_are_asynchronous_on_gpus_that_serve_nobody_else() -> None:
    gate = GateConfig(page="p", ttft_s=1.0)
    ahead = [({}, False), ({"device": "cuda"}, True), ({"device": "cuda", "gate": gate}, False)]
    for fields, wanted in ahead:
        assert engine_arguments(config(**fields))["async_scheduling"] is wanted
        assert not engine_arguments(config(async_steps=False, **fields))["async_scheduling"]


def test_a_prompt_must_leave_room_for_one_token() -> None:
    assert read_prompt(Generate("r", pack_i32([0] * 7), 1), 8, 10) == [0] * 7
    with pytest.raises(TurnRejected, match="8 tokens"):
        read_prompt(Generate("r", pack_i32([0] * 8), 1), 8, 10)


@given(st.lists(st.tuples(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=3), st.integers(0, 3))))
def test_version_spans_add_up_to_the_tokens(steps: list[tuple[list[int], int]]) -> None:
    turn = TurnInFlight("r", arrived=1.0)
    for tokens, version in steps:
        turn.extend(tokens, [-0.5] * len(tokens), version)
    done = turn.finish("stop", now=3.0)
    flat = [(token, version) for tokens, version in steps for token in tokens]
    assert unpack_i32(done.tokens) == [token for token, _ in flat]
    assert len(np.frombuffer(done.logprobs, np.float32).tolist()) == len(flat)
    assert [version for version, count in done.versions for _ in range(count)] == [version for _, version in flat]
    assert all(a[0] != b[0] for a, b in zip(done.versions, done.versions[1:], strict=False))


def test_a_turn_that_never_ran_only_queued() -> None:
    done = TurnInFlight("r", arrived=1.0).finish("abort", now=3.0)
    assert (done.queue_s, done.run_s) == (2.0, 0.0)


@pytest.mark.parametrize("logprob", [math.nan, math.inf, -math.inf])
def test_a_turn_with_a_log_probability_that_is_not_finite_is_an_error_without_tokens(logprob: float) -> None:
    turn = TurnInFlight("r", arrived=1.0)
    turn.extend([1, 2], [-0.5, -0.1], 3)
    turn.extend([4], [logprob], 3)
    done = turn.finish("stop", now=3.0)
    assert (done.finish, done.error) == ("error", NOT_FINITE)
    assert (done.tokens, done.logprobs, done.versions) == (b"", b"", ())


def test_reports_are_paced_while_busy_and_follow_falling_idle_once() -> None:
    pacer = Pacer()
    assert not pacer.due(0.0, worked=False, busy=False)
    assert pacer.due(1.0, worked=True, busy=True)
    assert not pacer.due(1.4, worked=True, busy=True)
    assert pacer.due(1.5, worked=True, busy=True)
    assert pacer.due(1.6, worked=True, busy=False)
    assert not pacer.due(9.0, worked=False, busy=False)
    # A request that lived for one step, and one that was aborted.
    assert pacer.due(9.1, worked=True, busy=False)
    assert pacer.due(10.0, worked=True, busy=True)
    assert pacer.due(10.1, worked=False, busy=False)


def test_a_gpu_engine_whose_cache_has_a_size_starts_in_the_memory_that_is_left() -> None:
    gate = GateConfig(page="page", ttft_s=0.5)
    for shared in ({"gate": gate, "kv_cache_mb": 64}, {"kv_cache_mb": 64}):
        assert engine_arguments(config(device="cuda", **shared))["gpu_memory_utilization"] < 0.1
    assert "gpu_memory_utilization" not in engine_arguments(config(device="cuda", kv_cache_mb=0))
