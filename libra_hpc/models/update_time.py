"""Seconds of a weight update: trainers write what changed, carriers move it, engines stage it and switch.

- Bytes follow from the share of elements that changed (`libra_hpc.weights.delta`): byte gaps, or all of them.
- An engine stages and switches whole weights, whatever changed; each of its GPUs has its share of them.
- A run has measured an update -> its numbers (`measured`) instead of the constants here, docs/log.
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
LEAST_DIFF_S, CHANGED_S, MOST_DIFF_S = 0.38, 1.0, 0.68
"""Per dense GB and training process, to write what changed; the second times the share. Of one quiet CPU core, 0.38 at
0.8 % and 0.68 at 52 %; a busy machine took up to twice as long. Not measured on a GPU."""
WIRE_BYTES_S = 1.1e9
"""From node to node: what one TCP stream reached on two cores; no network of the device table is slower."""
COPY_S = 0.15
"""Per GB copied in host memory. An image takes one copy of what comes, staging two of a GPU's weights."""
GB = 1e9


class UpdateTime(msgspec.Struct, frozen=True):
    """Seconds of one version."""

    diff_s: float = 0.0
    """Seconds of the trainers, which do not train meanwhile."""
    wire_s: float = 0.0
    """From the trainers to the images of all nodes."""
    stage_s: float = 0.0
    """Seconds of an engine of one GPU, beside its steps; tensor parallelism divides it."""
    pause_s: float = 0.0
    """The same, between two steps."""

    def by(self, processes: int) -> UpdateTime:
        """Return the time of ``processes`` training processes, where this is the time of one."""
        return msgspec.structs.replace(self, diff_s=self.diff_s / processes)

    def way_s(self, tp: int) -> float:
        """From the diff to the pause of an engine of ``tp`` GPUs."""
        return self.wire_s + self.stage_s / tp

    def words(self, tp: int) -> str:
        """For engines of ``tp`` GPUs."""
        late = self.diff_s + self.way_s(tp)
        return f"{late:.2f} s until engines at TP{tp} have them, pause {self.pause_s / tp:.3f} s"


NO_UPDATE = UpdateTime()


def sent_share(changed: float) -> float:
    """Bytes sent over those of all weights, in bf16."""
    return min(1.5 * changed, 1.0)


def update_time(shape: ModelShape, device: Device, changed: float = CHANGED) -> UpdateTime:
    """The assumed time with one training process; float32 weights are sent whole."""
    share, size = 1.0 if shape.dtype_bytes == 4 else sent_share(changed), shape.weight_bytes / GB
    return UpdateTime(
        diff_s=min(LEAST_DIFF_S + CHANGED_S * changed, MOST_DIFF_S) * size,
        wire_s=share * size * (GB / min(device.inter_bytes_s, WIRE_BYTES_S) + COPY_S),
        stage_s=2 * COPY_S * size,
        pause_s=shape.weight_bytes / device.host_bytes_s,
    )


def measured(lines: Iterable[Mapping[str, Any]], tp: int, processes: int) -> UpdateTime | None:
    """Return the update time of one training process and one GPU, from the medians of a run's ``metrics.jsonl``.

    The run has so many training processes and engines of ``tp`` GPUs. None without an update.
    """
    known = [line for line in lines if "pause_s" in line and "diff_s" in line]
    if not known:
        return None
    typical = {
        name: median(line[name] for line in known) for name in ("diff_s", "wire_s", "image_s", "stage_s", "pause_s")
    }
    return UpdateTime(
        diff_s=typical["diff_s"] * processes,
        wire_s=typical["wire_s"] + typical["image_s"],
        stage_s=typical["stage_s"] * tp,
        pause_s=typical["pause_s"] * tp,
    )
