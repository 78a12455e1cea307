"""New weights of one vLLM worker: made ready beside decoding, then switched in one pause.

- The changes since the version in the model came in pieces -> they are made ready by index; nothing else is read.
- Otherwise the node's image is read, and each parameter made aside, in a thread.
- CPU: linears and experts own packed copies of their weights.  They are packed aside too, so the pause only exchanges
  references.
- Other devices: the pause copies into the parameters (`in_place`).
- What was replaced is freed by a thread, one after the other: returning large memory stops all threads.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import safe_open
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

from libra_hpc.models.architecture import read_shape
from libra_hpc.weights.blocks import Slice, engine_slices
from libra_hpc.weights.delta import piece_values
from libra_hpc.weights.pieces import elements, payload_path, read_offer
from libra_hpc.weights.weightfile import WeightFileError

from .in_place import InPlace
from .landing import landed, tensor_places, transposed

NICENESS = 10
"""Niceness of the thread that stages: decoding goes first where cores are few."""
EMBEDDING, HEAD = "model.embed_tokens", "lm_head"
EXPERTS = ("w13_weight", "w2_weight")


class Swap(NamedTuple):
    module: Any
    name: str
    value: Any


class Staging:
    """One version on its way into a worker's model; `outcome` is there when it is ready."""

    def __init__(
        self, model: torch.nn.Module, model_folder: str, place: tuple[int, int], *, in_place: bool | None = None
    ) -> None:
        """``place``: tensor-parallel ranks and this one.  ``in_place``: whether parameters keep their addresses; None:
        those of a CPU do not."""
        shape, (tp, rank) = read_shape(Path(model_folder)), place
        self._model, self._experts = model, shape.experts
        self._transposed = shape.stacked_experts
        self._places: dict[str, list[Slice]] = defaultdict(list)
        for slices in engine_slices(shape, tp, rank).values():
            for one in slices:
                self._places[one.parameter].append(one)
        self._swaps: list[Swap] = []
        exchanged = next(model.parameters()).is_cpu if in_place is None else not in_place
        self._in_place = None if exchanged else InPlace()
        self._landing: dict[str, list[tuple[torch.nn.Parameter, Slice]]] = {}
        """Where elements of each tensor lie; made with the first pieces."""
        self._thread: threading.Thread | None = None
        self._error = ""

    def start(self, image: str, versions: Sequence[Sequence[str]] = ()) -> None:
        """Begin with a version; the caller holds the lease of the image until `outcome` is there.

        ``versions``: manifests of the versions that lead to it from the one in the model, instead of the image.
        """
        assert self._thread is None
        self._thread = threading.Thread(target=self._run, args=(image, versions), daemon=True, name="stage")
        self._thread.start()

    def outcome(self) -> str | None:
        """None while it works, empty when it is ready, else why it cannot be."""
        assert self._thread is not None
        return None if self._thread.is_alive() else self._error

    def drop(self) -> None:
        """Drop a version that is not to be switched to."""
        if self._in_place:
            self._in_place.drop()
        self._end()

    def _end(self) -> None:
        self._swaps, self._thread, self._error = [], None, ""

    def switch(self) -> None:
        """Exchange old for new; between two steps."""
        if self._in_place:
            self._in_place.switch()
        old = []
        for module, name, value in self._swaps:
            old.append(getattr(module, name))
            setattr(module, name, value)
        self._end()
        threading.Thread(target=_free, args=(old,), daemon=True, name="free").start()

    def _run(self, image: str, versions: Sequence[Sequence[str]]) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        try:
            if versions:
                for manifests in versions:
                    self._stage_pieces(manifests)
                return
            with safe_open(image, framework="pt") as file, torch.no_grad():
                self._swaps = self._staged({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
        except Exception as error:
            self._error = f"{image}: {error}" if isinstance(error, WeightFileError) else f"{image}: {error!r}"

    def _stage_pieces(self, manifests: Sequence[str]) -> None:
        """Make the changes of one version ready."""
        assert self._in_place is not None, "packed copies are made of whole weights"
        parts: dict[torch.nn.Parameter, list[tuple[Any, Any]]] = defaultdict(list)
        for manifest in map(Path, manifests):
            offer = read_offer(manifest)
            with payload_path(manifest).open("rb") as file:
                payload = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) if offer.size else b""
            for piece in offer.pieces:
                index, values = piece_values(piece, payload)
                places = tensor_places(piece.block, np.arange(elements(piece.block)) if index is None else index)
                for parameter, where in self._targets(piece.block.tensor):
                    found, chosen = landed(places, where)
                    if self._transposed and where.parameter.rpartition(".")[2] in EXPERTS:
                        found = transposed(found, parameter.numel() // self._experts // where.stride, where.stride)
                    if len(found):
                        parts[parameter].append((found, values[chosen]))
        for parameter, own in parts.items():
            places, values = (np.concatenate(part) for part in zip(*own, strict=True))
            kind = torch.bfloat16 if values.itemsize == 2 else torch.float32
            self._in_place.stage(
                parameter, torch.from_numpy(values).view(kind), torch.from_numpy(places.astype(np.int32))
            )

    def _targets(self, tensor: str) -> list[tuple[torch.nn.Parameter, Slice]]:
        """Parameters of this model that have elements of a tensor; a tied head is the embedding's parameter."""
        if not self._landing:
            self._landing = defaultdict(list)
            for name, parameter in self._model.named_parameters():
                for one in self._places.get(name) or self._tied(name):
                    self._landing[one.block.tensor].append((parameter, one))
        return self._landing[tensor]

    def _tied(self, name: str) -> list[Slice]:
        return self._places[f"{EMBEDDING}.weight"] if name == f"{HEAD}.weight" else []

    def _staged(self, tensors: dict[str, torch.Tensor]) -> list[Swap]:
        swaps: list[Swap] = []
        made: dict[int, torch.Tensor] = {}
        for name, module in self._model.named_modules():
            for kind, parameter in module.named_parameters(recurse=False):
                # A tied head has the embedding's parameter, and a packed copy of its own.
                value = made.get(id(parameter))
                if value is None:
                    value = made[id(parameter)] = self._value(f"{name}.{kind}", parameter, tensors)
                    if self._in_place:
                        self._in_place.stage(parameter, value)
                    elif parameter.numel() and kind not in EXPERTS:
                        swaps.append(Swap(parameter, "data", _held(name, value)))
                if not self._in_place and kind == "weight" and "cpu_linear" in vars(module) and self._used(name):
                    swaps.append(Swap(module, "cpu_linear", _packed(value, bool(parameter.numel()))))
            if not self._in_place and all(hasattr(module, kind) for kind in EXPERTS):
                swaps += _experts(module, {kind: made[id(getattr(module, kind))] for kind in EXPERTS})
        return swaps

    def _used(self, name: str) -> bool:
        """Whether a packed copy is ever multiplied with: that of an embedding is not, unless it is the head itself."""
        return (
            name != EMBEDDING
            or not hasattr(self._model, HEAD)
            or self._model.get_submodule(HEAD) is (self._model.get_submodule(EMBEDDING))
        )

    def _value(self, name: str, parameter: torch.Tensor, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        """This rank's part of a parameter, as vLLM would load it, from whole tensors."""
        places = self._places.get(name) or self._tied(name)
        if not places and name.endswith(".w2_bias"):
            # The first tensor rank adds it.
            return torch.zeros_like(parameter)
        if not places:
            raise WeightFileError(f"the map has no place for the engine's parameter {name}")
        cols = places[0].stride
        size = max(one.offset + (one.block.rows - 1) * one.stride + one.block.cols for one in places)
        # A vocabulary is padded with zeros; a packed parameter is empty, and packed experts may be padded.
        whole = parameter.numel() if size < parameter.numel() and name.rpartition(".")[2] not in EXPERTS else size
        # Some parameters have a wider type than the model.
        flat = torch.zeros(whole, dtype=parameter.dtype)
        for (tensor, offset, rows, width, stride), _, to, step in places:
            source = tensors[tensor].reshape(-1)[offset:]
            target = flat.as_strided((rows, width), (step, 1), to)
            target.copy_(source.as_strided((rows, width), (stride, 1), source.storage_offset()))
        if name.rpartition(".")[2] in EXPERTS:
            value = flat.view(self._experts, -1, cols)
            value = value.transpose(1, 2).contiguous() if self._transposed else value
        else:
            value = flat if parameter.ndim == 1 and parameter.numel() else flat.view(-1, cols)
        return value


def _packed(value: torch.Tensor, keep: bool) -> Any:
    """What a CPU linear calls to multiply with ``value``."""
    aside = torch.nn.Module()
    aside.weight = torch.nn.Parameter(value, requires_grad=False)
    dispatch_cpu_unquantized_gemm(aside, remove_weight=not keep)
    return aside.cpu_linear


def _held(name: str, value: torch.Tensor) -> torch.Tensor:
    """A module's weight as vLLM has it: a convolution is packed in bfloat16, where the CPU has instructions for it."""
    if not name.endswith(".conv1d"):
        return value
    aside = torch.nn.Module()
    aside.weight = torch.nn.Parameter(value[:, None], requires_grad=False)
    dispatch_cpu_unquantized_gemm(aside, remove_weight=False)
    held: torch.Tensor = aside.weight.data
    return held


def _experts(module: Any, values: dict[str, torch.Tensor]) -> list[Swap]:
    aside = torch.nn.Module()
    for kind, value in values.items():
        aside.register_parameter(kind, torch.nn.Parameter(value, requires_grad=False))
    module.quant_method.moe_kernel.fused_experts.process_weights_after_loading(aside)
    return [Swap(getattr(module, kind), "data", getattr(aside, kind).data) for kind in EXPERTS]


def _free(old: list[Any]) -> None:
    while old:
        old.pop()
