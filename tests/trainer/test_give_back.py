"""Memory of a replica in standby: on a CPU the kernel may take it, and has it back at once where it did not."""

from __future__ import annotations

from pathlib import Path

import torch

from libra_hpc.trainer.device import give_back, take_again

BYTES = 64 << 20


def lazily_free() -> int:
    """Bytes of this process that the kernel may take."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("LazyFree:")) * 1024


def test_given_back_memory_is_the_kernels_until_it_is_written_again() -> None:
    """Values beside it, on the same pages, stay."""
    whole = torch.ones(BYTES // 4)
    inner = whole[1:-1]
    before = lazily_free()
    give_back(inner)
    assert lazily_free() - before >= 0.9 * BYTES
    take_again(inner)
    inner.fill_(2.0)
    assert lazily_free() - before <= 0.1 * BYTES
    assert whole[0] == whole[-1] == 1.0
    assert bool((inner == 2.0).all())
