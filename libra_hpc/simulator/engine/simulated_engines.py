"""Build simulated engines from a pattern such as ``4xTP1,2xTP2,2xTP4`` and a number of GPUs.

The pattern is repeated as often as it fits the GPUs; without a number it is built once.
"""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from libra_hpc.errors import invalid
from libra_hpc.models.devices import device as find_device
from libra_hpc.models.shapes import KV_ELEMENT_BYTES, model_shape
from libra_hpc.models.step_times.lookup import lookup
from libra_hpc.models.step_times.steps import StepTimes
from libra_hpc.simulator.settings import EngineSpec

PATTERN = re.compile(r"^(\d+)xTP(\d+)$", re.IGNORECASE)
EXAMPLE = "counts and TP degrees such as 4xTP1,2xTP2,2xTP4"


MOST_GPUS = 100_000
"""More take minutes to be simulated, and no cluster has them."""


class Bucket(msgspec.Struct, frozen=True):
    count: int
    tp: int


class SimulatedEngines(msgspec.Struct, frozen=True):
    """The engines of a pattern."""

    engines: list[EngineSpec]
    gpus: int
    empty: int
    """GPUs that no whole pattern fills."""
    source: str


def parse_buckets(text: str) -> list[Bucket]:
    """Buckets of a pattern in ascending TP; raises `UserError`."""
    buckets: dict[int, int] = {}
    for part in text.split(","):
        match = PATTERN.match(part.strip())
        if match is None or not 0 < int(match[1]) * int(match[2]) <= MOST_GPUS:
            raise invalid("--buckets", text, f"{part.strip()!r} is not a bucket", EXAMPLE)
        buckets[int(match[2])] = buckets.get(int(match[2]), 0) + int(match[1])
    return [Bucket(count, tp) for tp, count in sorted(buckets.items())]


def build_engines(
    buckets: str,
    gpus: int,
    device: str,
    model: str,
    *,
    calibration: Path | None = None,
    devices_file: Path | None = None,
    kv_dtype: str = "auto",
    longest: int = 0,
    async_steps: bool = True,
) -> SimulatedEngines:
    """Build the engines of a pattern on ``gpus`` GPUs (0: as many as the pattern has).

    ``kv_dtype`` and ``async_steps``: as in the run file; measured steps have the host's work as it was measured.
    ``longest``: most tokens of a context, 0: unknown.

    Raises `UserError` for a pattern that does not fit, and as `lookup` does for unknown devices and models.
    """
    if kv_dtype not in KV_ELEMENT_BYTES:
        raise invalid("--kv-dtype", kv_dtype, "unknown type", list(KV_ELEMENT_BYTES))
    if calibration and kv_dtype != "auto":
        raise invalid("--kv-dtype", kv_dtype, "a calibration file has the engines that were measured", "one of the two")
    pattern = parse_buckets(buckets)
    size = sum(bucket.count * bucket.tp for bucket in pattern)
    if gpus and size > gpus:
        raise invalid(
            "--buckets", buckets, f"it has {size} GPUs, more than --gpus = {gpus}", f"a pattern of at most {gpus} GPUs"
        )
    copies = gpus // size if gpus else 1
    # A model that was measured need be in no table.
    shape = None if calibration else model_shape(model).with_kv(kv_dtype, longest)
    machine = find_device(device, devices_file).asynchronous() if async_steps else device
    engines: list[EngineSpec] = []
    sources: list[str] = []
    for bucket in pattern:
        steps: StepTimes = lookup(machine, shape or model, bucket.tp, calibration, devices_file=devices_file)
        if steps.kv_capacity <= 0:
            raise invalid(
                "--buckets",
                buckets,
                f"{model} does not fit {bucket.tp} x {device}: its weights leave no memory for KV cache",
                "a larger TP degree",
            )
        engines += [EngineSpec(f"tp{bucket.tp}-{number}", bucket.tp, steps) for number in range(copies * bucket.count)]
        sources.append(steps.source.replace(f" on {bucket.tp} x {device}", ""))
    return SimulatedEngines(engines, copies * size, max(0, gpus - copies * size), "; ".join(dict.fromkeys(sources)))
