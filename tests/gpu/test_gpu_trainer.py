"""The Megatron worker process on a GPU: the CPU's steps, bfloat16 beside float32, and a standby that really gives
the memory back."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from libra_hpc.protocol.trainer import Freed, Join, Joined, Standby, StepDone
from libra_hpc.trainer.device import backend, bare_group, file_store, wait
from tests.trainer.batches import train_step
from tests.trainer.support import Replica, make_model

MIB = 1 << 20
WEIGHTS = 2e-4
"""Tolerance on float32 weights after three steps of learning rate 1e-3: the sums of a GPU's kernels differ in order
from the CPU's."""
MOMENTS = 1e-5


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "qwen3"
    make_model("qwen3", folder)
    return folder


def _steps(replica: Replica, count: int, minibatches: int = 1) -> list[StepDone]:
    replica.ready()
    replica.ask(Join(0, 0, 1, ""), Joined)
    return [replica.ask(train_step(step, 0, minibatches=minibatches), StepDone) for step in range(1, count + 1)]


@pytest.mark.parametrize("minibatches", [1, 2])
def test_a_gpu_takes_the_steps_of_a_cpu(
    minibatches: int, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = Replica(tmp_path, "gpu", model_dir, device="cuda")
    on_gpu = _steps(gpu, 3, minibatches)
    got = gpu.tensors(3)
    assert gpu.close() == [0]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    cpu = Replica(tmp_path, "cpu", model_dir)
    on_cpu = _steps(cpu, 3, minibatches)
    want = cpu.tensors(3)
    assert cpu.close() == [0]
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        tolerance = MOMENTS if name.startswith("exp_avg") else WEIGHTS
        assert (got[name] - tensor).abs().max() <= tolerance, name
    for a, b in zip(on_gpu, on_cpu, strict=True):
        assert a.numbers["trained_tokens"] == b.numbers["trained_tokens"]
        assert a.numbers["loss"] == pytest.approx(b.numbers["loss"], abs=1e-4)
        assert a.numbers["grad_norm"] == pytest.approx(b.numbers["grad_norm"], rel=1e-3)


def test_bfloat16_follows_float32(model_dir: Path, tmp_path: Path) -> None:
    reports: dict[str, list[StepDone]] = {}
    for dtype in ("float32", "bfloat16"):
        replica = Replica(tmp_path, dtype, model_dir, device="cuda", dtype=dtype)
        reports[dtype] = _steps(replica, 3)
        assert replica.close() == [0]
    for half, full in zip(reports["bfloat16"], reports["float32"], strict=True):
        assert half.numbers["grad_norm"] == pytest.approx(full.numbers["grad_norm"], rel=0.1)
        assert half.numbers["entropy"] == pytest.approx(full.numbers["entropy"], rel=0.02)


def _wide_model(folder: Path) -> int:
    """A Qwen3 of some 50 million parameters, whose memory stands out from a process's own; returns their number."""
    import transformers

    config = transformers.Qwen3Config(
        vocab_size=64,
        hidden_size=1024,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=2816,
        tie_word_embeddings=False,
        max_position_embeddings=256,
        dtype="float32",
    )
    model: Any = transformers.Qwen3ForCausalLM(config)
    model.save_pretrained(folder)
    return sum(p.numel() for p in model.parameters())


def _free() -> int:
    gc.collect()
    return torch.cuda.mem_get_info()[0]


def test_a_replica_in_standby_frees_its_weights_and_gradients(tmp_path: Path) -> None:
    parameters = _wide_model(tmp_path / "model")
    replica = Replica(tmp_path, "r", tmp_path / "model", device="cuda", dtype="bfloat16", elastic=True)
    replica.ready()
    busy = _free()
    replica.ask(Standby(), Freed)
    freed = _free() - busy
    # Weights (2 bytes) and gradients (4 bytes).
    assert freed >= 0.95 * 6 * parameters, f"{freed / MIB:.0f} MiB of {6 * parameters / MIB:.0f}"
    assert replica.close() == [0]


def test_a_group_of_replicas_sums_over_nccl(tmp_path: Path) -> None:
    device = torch.device("cuda", 0)
    assert backend(device) == "nccl"
    group = bare_group(device, file_store(str(tmp_path / "meet"), 1), 0, 1, 60.0)
    buffer = torch.arange(4.0, device=device)
    wait(group.allreduce([buffer]), 60.0)
    assert buffer.tolist() == [0.0, 1.0, 2.0, 3.0]
