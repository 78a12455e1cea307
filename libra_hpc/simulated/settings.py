"""Settings of the simulated processes, as JSON, beside the configuration that the real process would get.

Importable without pydantic: a dry run of 48 GPUs starts some 60 processes on one machine, which all pay for imports.
The schema of ``[simulated]`` (`libra_hpc.config.simulated`) has the defaults; `dry_run` passes every value.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

Positive = Annotated[float, msgspec.Meta(gt=0)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]


class Pace(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The modelled hardware, model and times of an engine or trainer.  All ``*_s`` are simulated seconds."""

    device: str
    """A device of `libra_hpc.models.devices`, or of the file ``devices``."""
    devices: str
    model: str
    """A short name, or a Hugging Face folder."""
    calibration: str
    source: str
    speedup: Positive
    """Simulated seconds per second of the wall clock."""
    mfu: Positive
    """Share of the devices' peak FLOP/s in a training step."""
    step_s: Seconds
    """Part of a training step that does not depend on its tokens."""
    start_s: Seconds
    """From the start of a process until it is ready."""
    wake_s: Seconds
    """Added to the first weight update, or the first joining, after standby."""
    sync_s: Seconds


class Workload(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The workload an environment host replays."""

    trace: str
    presets: tuple[str, ...]
    """Presets of `libra_hpc.traces.profiles`, one after the other; this and the next three are for generation."""
    sibling: float
    outcome: float
    drift: float
    prompts: Annotated[int, msgspec.Meta(ge=1)]
    group: Annotated[int, msgspec.Meta(ge=1)]
    max_context: int
    seed: int
    speedup: Positive
