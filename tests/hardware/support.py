"""Devices whose host takes no time: operator tables state the device's time alone."""

from __future__ import annotations

from typing import Any

import msgspec

from libra_hpc.hardware.devices import Device, device


def bare(name: str, **changes: Any) -> Device:
    """The built-in device, without its host's work."""
    return msgspec.structs.replace(device(name), host_s=0.0, host_sequence_s=0.0, **changes)
