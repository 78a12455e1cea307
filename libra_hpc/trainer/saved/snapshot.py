"""A rank's part of the training state in shared memory, for a restart in the same layout.

One file has the float32 shards that the rank owns, under Megatron-Core's names: ``KIND:NAME``, flat. The weights are
derived from them. A checkpoint, which any layout reads, is `libra_hpc.trainer.saved.shard_files`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open

from libra_hpc.state import state_folders as folders
from libra_hpc.weights.safetensors_writer import write_safetensors

from .optimizer_state import OptimizerState


def _file(folder: Path, rank: int) -> Path:
    return folder / f"snapshot-{rank:05d}.safetensors"


def pieces(state: OptimizerState) -> dict[str, torch.Tensor]:
    """The tensors of this rank's file, as the optimizer holds them."""
    shards = state.shards.items()
    return {f"{kind}:{name}": tensor.data for name, shard in shards for kind, tensor in shard.kinds().items()}


def holds(folder: Path, rank: int) -> bool:
    """Whether the folder is a snapshot of this rank, not a checkpoint."""
    return _file(folder, rank).is_file()


def write(copies: Mapping[str, torch.Tensor], folder: Path, rank: int) -> None:
    """Write this rank's file; raises `OSError` when there is no room."""
    folders.check_room(folder, sum(piece.nbytes for piece in copies.values()))
    shapes = {name: tuple(piece.shape) for name, piece in copies.items()}
    write_safetensors(_file(folder, rank), torch.float32, shapes, copies.items())


@torch.no_grad()
def load(state: OptimizerState, folder: Path, rank: int) -> None:
    """Replace the state by that of the snapshot; collective over the data-parallel ranks.

    Raises `ValueError` when it is of another layout.
    """
    counters = folders.read_state(folder)
    with safe_open(_file(folder, rank), framework="pt") as file:
        own = pieces(state)
        if own.keys() != set(file.keys()):
            raise ValueError(f"{folder} was written in another layout")
        for name, piece in own.items():
            piece.copy_(file.get_tensor(name))
    state.commit(counters.step, counters.updates)
    state.refresh()
