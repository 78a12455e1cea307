"""A rank's part of the training state in shared memory, for a restart in the same layout.

One file has the float32 shards that the rank owns, under Megatron-Core's names: ``KIND:NAME``, flat. The weights are
derived from them. A checkpoint, which any layout reads, is `libra_hpc.trainer.saved.shard_files`.
"""

from __future__ import annotations

from pathlib import Path

import torch

from libra_hpc.state import state_folders as folders

from .optimizer_state import OptimizerState
from .shard_files import opened


def part_file(folder: Path, rank: int) -> Path:
    return folder / f"snapshot-{rank:05d}.safetensors"


def pieces(state: OptimizerState) -> dict[str, torch.Tensor]:
    """The tensors of this rank's file, as the optimizer holds them."""
    shards = state.shards.items()
    return {f"{kind}:{name}": tensor.data for name, shard in shards for kind, tensor in shard.kinds().items()}


def holds(folder: Path, rank: int) -> bool:
    """Whether the folder is a snapshot of this rank, not a checkpoint."""
    return part_file(folder, rank).is_file()


@torch.no_grad()
def load(state: OptimizerState, folder: Path, rank: int) -> None:
    """Replace the state by that of the snapshot; collective over the data-parallel ranks.

    Raises `ValueError` when it is of another layout.
    """
    counters = folders.read_state(folder)
    with opened(part_file(folder, rank)) as file:
        own = pieces(state)
        if own.keys() != set(file.keys()):
            raise ValueError(f"{folder} was written in another layout")
        for name, piece in own.items():
            piece.copy_(file.get_tensor(name))
    state.commit(counters.step, counters.updates)
    state.refresh()
