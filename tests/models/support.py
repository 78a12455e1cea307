"""Devices without host time, as operator tables have device time alone."""

from __future__ import annotations

from typing import Any

import msgspec

from libra_hpc.models.devices import Device, device


def bare(name: str, **changes: Any) -> Device:
    """A built-in device without its host's work."""
    return msgspec.structs.replace(device(name), host_s=0.0, host_sequence_s=0.0, **changes)
