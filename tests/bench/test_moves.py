"""The bench of moves, with a real engine and real trainers of a tiny model."""

from __future__ import annotations

import asyncio

import pytest

from bench.gpu_model import random_model
from bench.moves import BACK, MODELS, measure


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.engine
def test_a_node_that_trains_a_step_and_goes_back_reads_its_own_weights_once() -> None:
    with random_model(MODELS["tiny"], "cpu") as folder:
        rounds = asyncio.run(measure(folder, "tiny", 2))
    for figures in rounds:
        assert figures["  bytes received from the core"] == 0.0
        assert figures["    versions loaded"] == 1.0
        assert 0.0 < figures[BACK] <= figures["pair, s"]
