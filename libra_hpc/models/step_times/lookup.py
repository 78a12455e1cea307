"""`lookup`: step times from the best source there is; `StepTimes.source` names it.

1. A calibration file (real engine steps), if given.
2. Operator tables, if the device's system and the model have them at that degree.
3. The roofline.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import msgspec

from libra_hpc.models.devices import Device, device
from libra_hpc.models.shapes import ModelShape, model_shape, shapes

from .measured import load, measured_times
from .roofline import Roofline
from .steps import StepTimes
from .tables import TableTimes, available, load_table


class HiddenHost:
    """`StepTimes` of asynchronous steps: the host forms a step while the device computes the one before."""

    def __init__(self, device_alone: StepTimes, machine: Device) -> None:
        self.tp, self.kv_capacity = device_alone.tp, device_alone.kv_capacity
        self.source = f"{device_alone.source}, asynchronous steps"
        self._device_s, self._host, self._sequence = device_alone.step_s, machine.host_s, machine.host_sequence_s

    def step_s(self, decodes: int, kv_tokens: int, prefill: int = 0, context: int = 0) -> float:
        return max(self._device_s(decodes, kv_tokens, prefill, context), self._host + decodes * self._sequence)


StepLookup = Callable[[Device, ModelShape, int], StepTimes]
"""Step times of a model on a replica of so many devices."""


def lookup(
    device_name: str | Device,
    model: str | Path | ModelShape,
    tp: int,
    calibration: str | Path | None = None,
    devices_file: str | Path | None = None,
) -> StepTimes:
    """Step times of ``model`` on one replica of ``tp`` devices.

    ``device_name`` is in the device table (or in ``devices_file``); ``model`` is a short name or the path of a
    Hugging Face config. Either may be the object itself. A calibration file has its own capacity, and must be of that
    device and model.

    Raises `UserError` for unknown names, a ``tp`` that does not shard the model or was not measured, and an unreadable
    file.
    """
    if calibration is not None:
        measured = load(calibration)
        measured.check(_name(device_name), _name(model), calibration)
        return measured_times(measured, tp)
    found = device_name if isinstance(device_name, Device) else device(device_name, devices_file)
    if found.async_steps:
        bare = msgspec.structs.replace(found, host_s=0.0, host_sequence_s=0.0, async_steps=False)
        return HiddenHost(lookup(bare, model, tp), found)
    shape = model if isinstance(model, ModelShape) else model_shape(model)
    path = available().get((found.tables, _known(shape)))
    if path is not None and tp in load_table(path).degrees:
        return _tabled(path, found, shape, tp)
    return Roofline(found, shape, tp)


@lru_cache(64)
def _tabled(path: Path, found: Device, shape: ModelShape, tp: int) -> TableTimes:
    """Cached: fitting a table's curves takes a twentieth of a whole search."""
    return TableTimes(load_table(path), found, shape, tp)


def _known(shape: ModelShape) -> str:
    """Short name of the built-in shape with these dimensions, whatever its KV caches; empty: none."""
    for name, built_in in shapes().items():
        if msgspec.structs.replace(shape, name=name, kv_element_bytes=0) == built_in:
            return name
    return ""


def _name(thing: str | Path | Device | ModelShape) -> str:
    return thing.name if isinstance(thing, (Device, ModelShape)) else Path(thing).name
