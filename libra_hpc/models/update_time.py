"""Seconds of a weight update: trainers write what changed, carriers move it, engines stage it and switch.

- Bytes follow from the share of elements that changed (`libra_hpc.weights.delta`): byte gaps, a bitmap, or all of them.
- An engine stages and switches whole weights, whatever changed; each of its GPUs has its share of them.
- A run has measured an update -> its numbers (`measured`) instead of the constants here, docs/lab/0.1-weights.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import median
from typing import Any

import msgspec

from .devices import Device
from .shapes import ModelShape

CHANGED = 0.03
"""Share that changes in a step: published runs have 0.006 to 0.045, at learning rates near 1e-6."""
LEAST_DIFF_S, CHANGED_S, MOST_DIFF_S = 0.15, 10.0, 2.5
"""Per dense GB and training process, to write what changed; the second times the share. Within a tenth of what one CPU
core took from 0.8 to 52 %; not measured on a GPU."""
WIRE_BYTES_S = 0.7e9
"""From node to node: what carriers reached on two cores; no network of the device table is slower."""
COPY_S = 0.15
"""Per GB copied in host memory. An image takes one copy of what comes, staging two of a GPU's weights."""
GB = 1e9


class UpdateTime(msgspec.Struct, frozen=True):
    """Seconds of one version."""

    diff_s: float = 0.0
    """Of the trainers, which do not train meanwhile."""
    wire_s: float = 0.0
    """From the trainers to the images of all nodes."""
    stage_s: float = 0.0
    """Of an engine of one GPU, beside its steps; tensor parallelism divides it."""
    pause_s: float = 0.0
    """The same, between two steps."""

    def words(self, tp: int) -> str:
        """For engines of ``tp`` GPUs."""
        late = self.diff_s + self.wire_s + self.stage_s / tp
        return f"{late:.2f} s until engines at TP{tp} have them, pause {self.pause_s / tp:.3f} s"


NO_UPDATE = UpdateTime()


def sent_share(changed: float) -> float:
    """Bytes sent over those of all weights, in bf16."""
    return min(1.5 * changed, 1 / 16 + changed, 1.0)


def update_time(shape: ModelShape, device: Device, processes: int, changed: float = CHANGED) -> UpdateTime:
    """The assumed time with so many training processes in the core; float32 weights are sent whole."""
    share, size = 1.0 if shape.dtype_bytes == 4 else sent_share(changed), shape.weight_bytes / GB
    return UpdateTime(
        diff_s=min(LEAST_DIFF_S + CHANGED_S * changed, MOST_DIFF_S) * size / processes,
        wire_s=share * size * (GB / min(device.inter_bytes_s, WIRE_BYTES_S) + COPY_S),
        stage_s=2 * COPY_S * size,
        pause_s=shape.weight_bytes / device.host_bytes_s,
    )


def measured(lines: Iterable[Mapping[str, Any]], tp: int) -> UpdateTime | None:
    """Of a run with engines of ``tp`` GPUs, by the medians of its ``metrics.jsonl``; None without an update."""
    known = [line for line in lines if "pause_s" in line and "diff_s" in line]
    if not known:
        return None
    typical = {
        name: median(line[name] for line in known) for name in ("diff_s", "wire_s", "image_s", "stage_s", "pause_s")
    }
    return UpdateTime(
        diff_s=typical["diff_s"],
        wire_s=typical["wire_s"] + typical["image_s"],
        stage_s=typical["stage_s"] * tp,
        pause_s=typical["pause_s"] * tp,
    )
