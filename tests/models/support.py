"""Devices without host time, and devices and models of a user."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from libra_hpc.models.devices import Device, device


def bare(name: str, **changes: Any) -> Device:
    """A built-in device without its host's work."""
    return msgspec.structs.replace(device(name), host_s=0.0, host_sequence_s=0.0, **changes)


def device_file(path: Path, name: str = "mi250x", **changes: object) -> Path:
    """A user's own table of one device."""
    figures = {"memory_bytes": 68.7e9, "peak_flops": 191.5e12, "hbm_bytes_s": 1.6e12, "intra_bytes_s": 100e9}
    figures |= {"inter_bytes_s": 12.5e9, "devices_per_node": 8, **changes}
    path.write_text("".join([f'["{name}"]\n', *(f"{key} = {value}\n" for key, value in figures.items())]))
    return path


def config_of(folder: Path, config: object) -> Path:
    """A model's folder with that `config.json`."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder
