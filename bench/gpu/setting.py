"""What is measured on a machine: device, model, sizes, and the file of a step's figures."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
from msgspec.structs import replace

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
    workspace_bytes=0.0,
    intra_bytes_s=1e10,
    inter_bytes_s=1e9,
    devices_per_node=1,
)
"""Stands for a GPU in a rehearsal: round figures, so that predictions are computed and mean nothing."""
LARGEST = model_shape("qwen3-4b")
"""The largest model that is measured without ``--model``."""
SMALLER = tuple(
    replace(LARGEST, name=name, layers=28, hidden=hidden, heads=16, intermediate=3 * hidden)
    for name, hidden in (("qwen3-1.7b", 2048), ("qwen3-0.6b", 1024))
)
"""For GPUs on which the optimizer state of 4 B parameters has no room, from their published configurations."""
TINY = replace(SMALLER[1], name="tiny", layers=4, hidden=512, head_dim=32, intermediate=1536, vocab=4096)
"""Model of a rehearsal: half a second a step on one core."""


class Sizes(NamedTuple):
    """What is measured on a kind of device."""

    threads: int
    """Of a process: several lengthen the steps of a rehearsal where other processes have the cores."""
    packs: tuple[int, int]
    """Tokens of micro-batches."""
    max_model_len: int
    sequences: int
    """That the engine decodes at once."""
    kv_cache_mb: int
    run_steps: int
    """Training steps of the whole run."""


SIZES = {"cuda": Sizes(4, (4096, 8192), 4096, 32, 8192, 10), "cpu": Sizes(1, (128, 256), 512, 8, 64, 4)}


class Figure(msgspec.Struct, frozen=True):
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
    gpu: str = ""
    """Name in the device table; empty: by the name that the driver reports."""
    devices: str = ""
    """TOML file with further devices; empty: none."""
    seconds: float
    """For the step."""

    @property
    def sizes(self) -> Sizes:
        return SIZES[self.device]

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
        return replace(known_device(self.gpu or listed_name(reported), path), memory_bytes=memory)

    def shape(self, hardware: Device) -> ModelShape:
        """The model; raises `UserError` when it has no room in training."""
        if self.device == "cpu":
            return TINY
        smallest = min(self.sizes.packs)
        candidates = [model_shape(self.model)] if self.model else [LARGEST, *SMALLER]
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
        "--gpu", reported, "the device table has no such GPU", [*devices(), "a name in the file of --devices"]
    )


def core_layout(pack_tokens: int) -> TrainLayout:
    """One GPU with the optimizer's state."""
    return TrainLayout(tp=1, pp=1, cp=1, ep=1, dp=1, micro_tokens=pack_tokens)


def core_memory(shape: ModelShape, hardware: Device, pack_tokens: int) -> TrainMemory:
    return train_memory(shape, core_layout(pack_tokens), hardware, micro_batches=1, pack_tokens=pack_tokens)
