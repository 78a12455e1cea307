"""Context parallelism and experts on one GPU: the attention of a sequence's later rows, and the steps of a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from libra_hpc.protocol.trainer import Join, Joined, StepDone
from libra_hpc.trainer.model.context import Tail, attend
from tests.trainer.batches import train_step
from tests.trainer.support import Replica, make_model

ROWS, COLUMNS, HEADS, GROUPS, WIDTH = 100, 700, 8, 2, 64
TAIL = Tail(begin=20, end=20 + ROWS, columns=range(50, 50 + COLUMNS))
PLAIN: dict[str, Any] = {"scale": None, "window": 0, "sinks": None}


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 2e-2)])
def test_later_rows_of_a_sequence_attend_as_on_a_cpu(dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(0)
    query = torch.randn(20 + ROWS, HEADS, WIDTH, requires_grad=True)
    whole = torch.randn(800, GROUPS, 2 * WIDTH, requires_grad=True)
    want = attend(query, *whole.chunk(2, -1), TAIL, **PLAIN)
    gradients = torch.autograd.grad(want.square().sum(), (query, whole))
    on_gpu = [x.detach().to("cuda", dtype).requires_grad_() for x in (query, whole)]
    got = attend(on_gpu[0], *on_gpu[1].chunk(2, -1), TAIL, **PLAIN)
    assert (got.float().cpu() - want).abs().max() < tolerance
    for mine, theirs in zip(torch.autograd.grad(got.square().sum(), on_gpu), gradients, strict=True):
        assert (mine.float().cpu() - theirs).abs().max() < tolerance * theirs.abs().max().clamp(min=1.0)


def test_a_gpu_takes_the_steps_of_a_cpu_with_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_model("qwen3_moe", tmp_path / "model")
    reports = []
    for device in ("cuda", "cpu"):
        if device == "cpu":
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        replica = Replica(tmp_path, device, tmp_path / "model", device=device)
        replica.ready()
        replica.ask(Join(0, 0, 1, ""), Joined)
        reports.append([replica.ask(train_step(step, 0), StepDone) for step in (1, 2, 3)])
        assert replica.close() == [0]
    for mine, theirs in zip(*reports, strict=True):
        assert mine.numbers["loss"] == pytest.approx(theirs.numbers["loss"], abs=1e-4)
        assert mine.numbers["grad_norm"] == pytest.approx(theirs.numbers["grad_norm"], rel=1e-3)
