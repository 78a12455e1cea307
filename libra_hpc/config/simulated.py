"""Section of the run file about dry runs: simulated devices, model, speed and workload."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from .section import FilePath, Seconds, Section


class SimulatedSection(Section, frozen=True):
    """``[simulated]``: simulated engines, trainers and tools; read only when ``run.engine`` is ``simulated``.
    Seconds are simulated ones."""

    speedup: Annotated[float, Meta(gt=0, le=1e6)] = 10.0
    """Simulated seconds per second of the wall clock. Real work (messages, scheduling) counts this many times, so the
    machine bounds it."""
    calibration: FilePath = ""
    """File of measured engine steps, used instead of tables; empty: none."""
    presets: list[str] = []
    """Kinds of generated work (docs/dry-run.md) instead of that of ``[task.work]``, one after the other, each for an
    equal share of the run."""
    start_s: Annotated[Seconds, Meta(ge=0)] = 60.0
    """Time from the start of an engine or a training process until it is ready."""
    wake_s: Annotated[Seconds, Meta(ge=0)] = 5.0
    """Time that standby adds to the next weight update of an engine, and to the next joining of a training process."""
    sync_s: Annotated[Seconds, Meta(ge=0)] = 2.0
    """Pause of an engine for a weight update."""
