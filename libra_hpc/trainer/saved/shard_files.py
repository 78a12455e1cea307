"""The optimizer's state as files, of a checkpoint, a snapshot, or as PEFT has adapters.

``optimizer/rank-NNNNN.safetensors`` of a checkpoint holds flat float32 pieces named ``KIND:NAME:PART:PARTS:BEGIN``:

- KIND: ``exp_avg``, ``exp_avg_sq``, and ``master`` where weights are in less than float32, or adapters are trained.
- NAME: the parameter's first Hugging Face tensor.
- PART of PARTS: the piece of the parameter that a tensor rank holds; BEGIN: first element of the flattened piece.

A reader with the same number of parts reads the elements it needs. Another one joins a whole parameter, one at a time.
A snapshot, in shared memory, has the shards of a rank under Megatron-Core's names, ``KIND:NAME``, for the same layout.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open

from libra_hpc.models.adapters import B, adapter_shapes
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


def snapshot_file(folder: Path, rank: int) -> Path:
    return folder / f"snapshot-{rank:05d}.safetensors"


def snapshot_pieces(state: OptimizerState) -> dict[str, torch.Tensor]:
    """The tensors of this rank's file, as the optimizer holds them."""
    shards = state.shards.items()
    return {f"{kind}:{name}": tensor.data for name, shard in shards for kind, tensor in shard.kinds().items()}


def holds_snapshot(folder: Path, rank: int) -> bool:
    """Whether the folder is a snapshot of this rank, not a checkpoint."""
    return snapshot_file(folder, rank).is_file()


@torch.no_grad()
def load_snapshot(state: OptimizerState, folder: Path, rank: int) -> None:
    """Replace the state by that of the snapshot; collective over the data-parallel ranks.

    Raises `ValueError` when it is of another layout.
    """
    counters = folders.read_state(folder)
    with opened(snapshot_file(folder, rank)) as file:
        own = snapshot_pieces(state)
        if own.keys() != set(file.keys()):
            raise ValueError(f"{folder} was written in another layout")
        for name, piece in own.items():
            piece.copy_(file.get_tensor(name))
    state.commit(counters.step, counters.updates)
    state.refresh()


PREFIX = "base_model.model."
"""PEFT's name of the model inside its own."""
EXPERTS = {"gate_up_proj": "experts.base_layer", "down_proj": "experts"}
"""Parameters of routed experts, and the modules of their adapters."""


def write_peft(checkpoint: Path, shape: Architecture, model: str, out: Path) -> int:
    """Make the folder ``out`` from a checkpoint of a run that began with ``model``; returns the count of adapters.

    Raises `OSError` where it exists, or there is no room.
    """
    assert shape.lora is not None
    pairs = read_adapters(checkpoint, shape)
    # The name without its layer: all layers of a kind have adapters.
    linears = {name.split(".", 3)[3] for name in pairs}
    routed = {one for one in linears if one.endswith(tuple(EXPERTS.values()))}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": model,
        "inference_mode": True,
        "r": shape.lora.rank,
        "lora_alpha": shape.lora.rank * shape.lora.scale,
        "target_modules": sorted(linears - routed),
        "target_parameters": [f"mlp.experts.{name}" for name in EXPERTS] if routed else None,
    }
    inside = "model.language_model." if shape.wrapper else "model."
    tensors = {
        f"{PREFIX}{name.replace('model.', inside, 1)}.lora_{one}.weight": tensor
        for name, pair in pairs.items()
        for one, tensor in zip("AB", pair, strict=True)
    }
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    out.mkdir(parents=True)
    write_safetensors(out / "adapter_model.safetensors", torch.float32, shapes, tensors.items())
    (out / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    return len(pairs)


def read_adapters(checkpoint: Path, shape: Architecture) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """A and B by the name of their module in transformers."""
    found: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = defaultdict(list)
    with ShardFiles(checkpoint, shape) as files:
        for name, entry in trained_entries(shape, ReplicaPlace(1, 0, 1, 0)).items():
            parts = files.whole("master", entry)
            if name.endswith(".lora_a"):
                low = parts[0]
            elif entry.expert is None:
                found.update({one.removesuffix(B): [(low, up)] for one, up in zip(entry.hf, parts, strict=True)})
            else:
                kind = EXPERTS["gate_up_proj" if ".linear_fc1." in name else "down_proj"]
                found[f"{entry.hf[0].partition('.experts.')[0]}.{kind}"].append((low, torch.cat(parts)))
    return {
        name: (torch.cat([a for a, _ in own]), torch.stack([b for _, b in own], dim=-1).flatten(1))
        for name, own in found.items()
    }
