"""The file of a measured training speed: JSON, written by ``libra-hpc calibrate train`` and read by the planner."""

from __future__ import annotations

from pathlib import Path

import msgspec

from libra_hpc.errors import invalid
from libra_hpc.files import read_named, write_result

FORMAT = "libra-hpc training speed 1"
FIELD, VALID = "planner.train_speed", "a file of libra-hpc calibrate train"


class TrainSample(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Steps of one batch: ``trajectories`` of ``context`` tokens each."""

    trajectories: int
    context: int
    steps: int
    seconds: float
    """Median of a step."""
    predicted: float
    """Seconds of the cost model without a factor."""


class TrainSpeed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Content of the file; the speeds are those of the sample with the most tokens per second."""

    device: str
    model: str
    layout: str
    tokens_s: float
    mfu: float
    factor: float
    """Measured over predicted seconds: the median over samples."""
    samples: tuple[TrainSample, ...]
    format: str = FORMAT


_decoder = msgspec.json.Decoder(TrainSpeed)


def save_speed(speed: TrainSpeed, path: Path) -> None:
    """Write ``speed``, readable; raises `UserError` when the file cannot be written."""
    write_result(path, msgspec.json.format(msgspec.json.encode(speed), indent=1) + b"\n")


def load_speed(path: Path) -> TrainSpeed:
    """Raises `UserError` for a file that is not one."""
    speed = read_named(FIELD, path, _decoder, f"{VALID}, or a run directory")
    if speed.format != FORMAT or not speed.factor > 0:
        raise invalid(FIELD, str(path), "not a training speed", VALID)
    return speed
