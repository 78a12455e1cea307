"""Devices without host time, devices and models of a user, and decode rates of operator tables."""

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


DATA_SHEET = {"a100": 80e9, "h200": 141e9}
"""Bytes of memory behind the rows of `DECODE` that KV limits: 0.9 of these are used. The driver reports 5 and 9 GB
more."""
DECODE = [
    ("a100", "qwen3-8b", 32, 1024, (2679, 4271, 6073, 6983)),
    ("a100", "qwen3-8b", 512, 1024, (27272, 32932, 33847, 31027)),
    ("a100", "qwen3-8b", 1024, 1024, (38983, 42618, 38755, 30474)),
    ("a100", "qwen3-8b", 4096, 1024, (47949, 44494, 39849, 35370)),
    ("a100", "qwen3-8b", 512, 32768, (1964, 2257, 2370, 2319)),
    ("a100", "qwen3-32b", 512, 1024, (2032, 11729, 13425, 12176)),
    ("a100", "qwen3-32b", 512, 8192, (173, 2712, 3673, 3939)),
    ("a100", "qwen3-32b", 512, 32768, (0, 704, 968, 1153)),
    ("h200", "qwen3-8b", 32, 1024, (6027, 8528, 11089, 11537)),
    ("h200", "qwen3-8b", 512, 1024, (63631, 76819, 74101, 65346)),
    ("h200", "qwen3-8b", 4096, 1024, (130078, 114778, 105183, 89223)),
    ("h200", "qwen3-8b", 512, 32768, (5981, 6339, 6504, 6448)),
    ("h200", "qwen3-32b", 128, 1024, (6061, 10293, 14018, 16127)),
    ("h200", "qwen3-32b", 512, 32768, (1492, 2628, 3048, 3205)),
]
"""Tokens/s of decoding on 8 devices as 8/TP replicas, composed from NVIDIA's operator tables: (device, model, sequences
in all, context of each, at TP 1, 2, 4, 8); 0: out of memory."""


def nominal(name: str) -> Device:
    return bare(name, memory_bytes=DATA_SHEET[name])
