"""What every step of `bench.gpu_check` shares: device, model, sizes, and the file of its figures.

A figure is written as soon as it is known, so that a step that fails later loses none.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from libra_hpc.errors import UserError, invalid
from libra_hpc.models.devices import Device, devices
from libra_hpc.models.devices import device as known_device
from libra_hpc.models.memory import TrainLayout, TrainMemory, memory_limit, train_memory
from libra_hpc.models.shapes import ModelShape, model_shape

CPU = Device(
    name="cpu",
    memory_bytes=8e9,
    peak_flops=1e12,
    hbm_bytes_s=2e10,
    intra_bytes_s=1e10,
    inter_bytes_s=1e9,
    devices_per_node=1,
    workspace_bytes=0.0,
)
"""Stands for a GPU in a rehearsal: round figures, so that predictions are computed and mean nothing."""
TINY = ModelShape(
    name="tiny",
    layers=4,
    hidden=512,
    heads=16,
    kv_heads=8,
    head_dim=32,
    intermediate=1536,
    vocab=4096,
    tied_embeddings=True,
    qk_norm=True,
)
"""Model of a rehearsal: half a second a step on one core, and buffers that a process gives back when it frees them."""
SMALLER = tuple(
    ModelShape(
        name=name,
        layers=28,
        hidden=hidden,
        heads=16,
        kv_heads=8,
        head_dim=128,
        intermediate=3 * hidden,
        vocab=151936,
        tied_embeddings=True,
        qk_norm=True,
    )
    for name, hidden in (("qwen3-1.7b", 2048), ("qwen3-0.6b", 1024))
)
"""For GPUs on which the optimizer state of 4 B parameters has no room, from their published configurations."""


class Figure(msgspec.Struct, frozen=True):
    """One line of the table."""

    what: str
    """With its unit."""
    measured: float | str
    predicted: float | None = None
    """By the planner's cost models."""


class Figures:
    """The file of a step's figures, one JSON line each."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def add(self, what: str, measured: float | str, predicted: float | None = None) -> None:
        with self._path.open("ab") as file:
            file.write(msgspec.json.encode(Figure(what, measured, predicted)) + b"\n")

    def read(self) -> list[Figure]:
        """Those so far; without a last one that a kill tore."""
        lines = self._path.read_bytes().split(b"\n")[:-1] if self._path.exists() else []
        return [msgspec.json.decode(line, type=Figure) for line in lines]


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """What is measured, and on what."""

    device: Literal["cuda", "cpu"]
    model: str = ""
    """Short name; empty: the largest that fits."""
    name: str = ""
    """Name in the device table; empty: by the name that the driver reports."""
    devices: str = ""
    """TOML file with further devices; empty: none."""
    limit_s: float
    """Time of the step."""

    @property
    def threads(self) -> int:
        """Of a process: several lengthen the steps of a rehearsal where other processes have the cores."""
        return 4 if self.device == "cuda" else 1

    @property
    def packs(self) -> tuple[int, int]:
        """Tokens of micro-batches to measure."""
        return (4096, 8192) if self.device == "cuda" else (128, 256)

    @property
    def max_model_len(self) -> int:
        return 4096 if self.device == "cuda" else 512

    @property
    def sequences(self) -> int:
        """That the engine decodes at once."""
        return 32 if self.device == "cuda" else 8

    @property
    def kv_cache_mb(self) -> int:
        return 8192 if self.device == "cuda" else 64

    @property
    def run_steps(self) -> int:
        """Training steps of the whole run."""
        return 10 if self.device == "cuda" else 4

    def check(self) -> None:
        """Raise `UserError` without the device; takes no memory of it."""
        if self.device == "cpu":
            return
        import torch

        if not torch.cuda.is_available():
            raise invalid("--device", "cuda", "torch sees no GPU", "cpu, for a rehearsal")

    def hardware(self) -> Device:
        """The device with the memory that it really has; raises `UserError` for an unknown one."""
        self.check()
        if self.device == "cpu":
            return CPU
        import torch

        reported, memory = torch.cuda.get_device_name(0), torch.cuda.mem_get_info(0)[1]
        path = Path(self.devices) if self.devices else None
        return msgspec.structs.replace(known_device(self.name or listed_name(reported), path), memory_bytes=memory)

    def shape(self, hardware: Device) -> ModelShape:
        """The model; raises `UserError` when it has no room in training."""
        if self.device == "cpu":
            return TINY
        smallest = min(self.packs)
        candidates = [model_shape(self.model)] if self.model else [model_shape("qwen3-4b"), *SMALLER]
        for candidate in candidates:
            limit = memory_limit(core_memory(candidate, hardware, smallest), hardware)
            if limit is None:
                return candidate
        raise UserError(f"--model = {candidates[-1].name!r}: training has no room, {limit.reason if limit else ''}.")


def listed_name(reported: str) -> str:
    """The entry of the device table that a driver's name contains; raises `UserError` without one."""
    words = reported.lower().replace("-", " ").split()
    for name in devices():
        if name in words:
            return name
    raise invalid(
        "--name", reported, "the device table has no such GPU", [*devices(), "a name in the file of --devices"]
    )


def core_layout(pack_tokens: int) -> TrainLayout:
    """One GPU with the optimizer's state."""
    return TrainLayout(tp=1, pp=1, cp=1, ep=1, dp=1, micro_tokens=pack_tokens)


def core_memory(shape: ModelShape, hardware: Device, pack_tokens: int) -> TrainMemory:
    return train_memory(shape, core_layout(pack_tokens), hardware, micro_batches=1, pack_tokens=pack_tokens)
