"""Memory of a replica in standby: on a CPU the kernel may take it, and has it back at once where it did not."""

from __future__ import annotations

import os

import torch

from bench.gpu_model import memory_field
from libra_hpc.trainer.device import give_back, take_again

BYTES = 64 << 20


def test_given_back_memory_is_the_kernels_until_it_is_written_again() -> None:
    """Values beside it, on the same pages, stay."""
    whole = torch.ones(BYTES // 4)
    inner = whole[1:-1]
    before = memory_field(os.getpid(), "LazyFree", "smaps_rollup")
    give_back(inner)
    assert memory_field(os.getpid(), "LazyFree", "smaps_rollup") - before >= 0.9 * BYTES
    take_again(inner)
    inner.fill_(2.0)
    assert memory_field(os.getpid(), "LazyFree", "smaps_rollup") - before <= 0.1 * BYTES
    assert whole[0] == whole[-1] == 1.0
    assert bool((inner == 2.0).all())
