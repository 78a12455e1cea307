"""The optimizer's state as files: every rank writes its shards, and any layout reads them.

``optimizer/rank-NNNNN.safetensors`` holds flat float32 pieces named ``KIND:NAME:PART:PARTS:BEGIN``:

- KIND: ``exp_avg``, ``exp_avg_sq``, and ``master`` where weights are in less than float32, or adapters are trained.
- NAME: the parameter's first Hugging Face tensor.
- PART of PARTS: the piece of the parameter that a tensor rank holds; BEGIN: first element of the flattened piece.

A reader with the same number of parts reads the elements it needs. Another one joins a whole parameter, one at a time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open

from libra_hpc.models.adapters import adapter_shapes
from libra_hpc.models.architecture import Architecture, Entry, hf_shapes
from libra_hpc.process.retry import patiently
from libra_hpc.state import state_folders as folders
from libra_hpc.weights.blocks import from_hf, to_hf
from libra_hpc.weights.names import ReplicaPlace, cut, trained_entries
from libra_hpc.weights.safetensors_writer import write_safetensors

from .optimizer_state import OptimizerState

FOLDER = "optimizer"


class _Piece(NamedTuple):
    begin: int
    end: int
    file: Any
    key: str


def rank_file(folder: Path, rank: int) -> Path:
    return folder / FOLDER / f"rank-{rank:05d}.safetensors"


def own_pieces(state: OptimizerState, shape: Architecture, place: ReplicaPlace) -> dict[str, torch.Tensor]:
    """The tensors of this rank's file, as the optimizer holds them."""
    tensors: dict[str, torch.Tensor] = {}
    entries = trained_entries(shape, place)
    for name, shard in state.shards.items():
        entry = entries[name]
        parts, part = cut(entry, place)
        # Whole parameters are equal on all tensor ranks, those of an expert on its own; a copy equals its original.
        if entry.copy or (parts == 1 and (place.tp_rank if entry.expert is None else place.etp_rank)):
            continue
        for kind, tensor in shard.kinds().items():
            if kind != "master" or state.mixed or shape.lora:
                tensors[f"{kind}:{entry.hf[0]}:{part}:{parts}:{shard.begin}"] = tensor.data
    return tensors


def write_pieces(pieces: Mapping[str, torch.Tensor], path: Path) -> None:
    """Write a rank's file of a checkpoint or snapshot; raises `OSError` when there is no room."""
    folders.check_room(path, sum(piece.nbytes for piece in pieces.values()))
    write_safetensors(path, torch.float32, {name: tuple(p.shape) for name, p in pieces.items()}, pieces.items())


def opened(path: Path) -> Any:
    """A safetensors file. The library takes any error for a missing file, so a plain read comes first."""
    patiently(lambda: path.open("rb").close())
    return safe_open(path, framework="pt")


class ShardFiles:
    """Reader of all files of a state; a context manager."""

    def __init__(self, folder: Path, shape: Architecture) -> None:
        self._stack = ExitStack()
        self._shape, self._hf_shapes = shape, hf_shapes(shape) | adapter_shapes(shape)
        self._pieces: dict[tuple[str, str], dict[int, list[_Piece]]] = defaultdict(lambda: defaultdict(list))
        self._parts: dict[str, int] = {}
        for path in sorted((folder / FOLDER).glob(f"rank-{5 * '[0-9]'}.safetensors")):
            file = self._stack.enter_context(opened(path))
            for key in list(file.keys()):
                kind, name, part, parts, begin = key.split(":")
                first, (size,) = int(begin), file.get_slice(key).get_shape()
                self._pieces[kind, name][int(part)].append(_Piece(first, first + size, file, key))
                self._parts[name] = int(parts)
        if not self._pieces:
            raise FileNotFoundError(f"no optimizer state in {folder}")

    def __enter__(self) -> ShardFiles:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def has(self, kind: str) -> bool:
        return any(found == kind for found, _ in self._pieces)

    def read(self, kind: str, entry: Entry, place: ReplicaPlace, begin: int, end: int) -> torch.Tensor:
        """Elements ``begin:end`` of this rank's part of a parameter, float32."""
        name = entry.hf[0]
        parts, part = cut(entry, place)
        saved = self._parts.get(name)
        if saved is None:
            raise ValueError(f"the state has no {name}: it is of a run with another [lora]")
        if saved == parts:
            return self._span(kind, name, part, begin, end)
        tensors = dict(zip(entry.hf, self.whole(kind, entry), strict=True))
        return from_hf(entry, tensors.__getitem__, self._shape, place).reshape(-1)[begin:end]

    def whole(self, kind: str, entry: Entry) -> list[torch.Tensor]:
        """All of a parameter as Hugging Face tensors, in the order of ``entry.hf``."""
        parts, name = [], entry.hf[0]
        for index in range(saved := self._parts[name]):
            size = self._part_shape(entry, saved, index)
            parts.append(self._span(kind, name, index, 0, size.numel()).view(size))
        return to_hf(entry, parts, self._shape, self._hf_shapes)

    def _part_shape(self, entry: Entry, parts: int, part: int) -> torch.Size:
        def empty(name: str) -> torch.Tensor:
            return torch.empty(self._hf_shapes[name], device="meta")

        place = ReplicaPlace(tp=parts, tp_rank=part, pp=1, pp_rank=0)
        if entry.stacked:
            place = place._replace(ep=parts, etp=1)
        return from_hf(entry, empty, self._shape, place).shape

    def _span(self, kind: str, name: str, part: int, begin: int, end: int) -> torch.Tensor:
        found = torch.empty(end - begin, dtype=torch.float32)
        filled = 0
        for low, high, source in self._overlaps(kind, name, part, begin, end):
            found[low - begin : high - begin] = source
            filled += high - low
        if filled != end - begin:
            raise ValueError(f"the state has {filled} of {end - begin} elements of {kind} of {name}")
        return found

    def _overlaps(
        self, kind: str, name: str, part: int, begin: int, end: int
    ) -> Iterator[tuple[int, int, torch.Tensor]]:
        for piece in self._pieces[kind, name][part]:
            low, high = max(begin, piece.begin), min(end, piece.end)
            if low < high:
                yield low, high, piece.file.get_slice(piece.key)[low - piece.begin : high - piece.begin]
