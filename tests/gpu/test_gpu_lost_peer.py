"""Replicas over NCCL on two GPUs: a peer that is lost in a step costs the step, not the process."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch

from tests.trainer.lost_peer import steps_without_the_lost_peer
from tests.trainer.support import make_model

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.mark.parametrize("fate", [signal.SIGKILL, signal.SIGSTOP])
def test_a_step_goes_on_without_a_peer_that_died_or_hangs(fate: signal.Signals, tmp_path: Path) -> None:
    make_model("qwen3", tmp_path / "model")
    on = [{"device": "cuda", "device_index": index} for index in range(2)]
    core, done = steps_without_the_lost_peer(tmp_path, tmp_path / "model", fate, core=on[0], replica=on[1])
    assert [one.step for one in done] == [1, 2, 3]
    assert all(0 < one.numbers["grad_norm"] < 1e3 for one in done)
    assert core.close() == [0]
