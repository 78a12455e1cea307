"""Decode of one sequence against published figures, tokens/s.

- Engines that schedule each step after the last one, as ours do: device time plus host work agrees.
- Compiled loops without a scheduler: the device time alone agrees, so the host work is what they save.
"""

from __future__ import annotations

import pytest

from libra_hpc.models.devices import Device, device
from libra_hpc.models.step_times.lookup import lookup

from .support import bare

# QwenLM/Qwen2.5, docs/source/benchmark/speed_benchmark.rst: vLLM 0.6 on A100 80GB, bf16, batch 1, 2,048 tokens after
# a prompt of 1.
SCHEDULED = [("qwen2.5-7b", 84.28), ("qwen2.5-32b", 22.13)]
# pytorch-labs/gpt-fast, README: Llama-2-70B on A100 80GB at 330 W, batch 1, prompts of 5 tokens.
COMPILED = [(2, 21.32), (4, 38.01), (8, 62.50)]


def tokens_s(machine: Device, model: str, tp: int, context: int) -> float:
    return 1.0 / lookup(machine, model, tp).step_s(1, context)


@pytest.mark.parametrize(("model", "published"), SCHEDULED)
def test_one_sequence_decodes_as_fast_as_in_an_engine_that_waits_for_each_step(model: str, published: float) -> None:
    assert tokens_s(device("a100"), model, 1, 1024) == pytest.approx(published, rel=0.05)


@pytest.mark.parametrize(("tp", "published"), COMPILED)
def test_without_host_work_it_decodes_as_fast_as_a_compiled_loop(tp: int, published: float) -> None:
    assert tokens_s(bare("a100"), "llama-3.1-70b", tp, 128) == pytest.approx(published, rel=0.1)
