"""What the processes of a dry run are told at their start, beside the configuration that the process they stand for
would get: plain data as JSON.

Importable without pydantic: a dry run of 48 GPUs starts some 60 processes on one machine, and each import is paid in
all of them.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

Positive = Annotated[float, msgspec.Meta(gt=0)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]


class Pace(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The modelled hardware and how fast its time passes.  All ``*_s`` are simulated seconds."""

    device: str
    """A device of `libra_hpc.hardware.devices`, or of the file ``devices``."""
    devices: str = ""
    model: str
    """A short name, or a Hugging Face folder."""
    calibration: str = ""
    source: str = "auto"
    speedup: Positive
    """Simulated seconds that pass in one second of the wall clock."""
    mfu: Positive
    """Share of the devices' peak that a training step reaches."""
    step_s: Seconds
    """Part of a training step that does not depend on its tokens."""
    start_s: Seconds
    """From the start of a process until it is ready."""
    wake_s: Seconds
    """What waking an engine from standby adds to its next weight update."""
    sync_s: Seconds
    """Pause of an engine for a weight update."""


class Workload(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The workload an environment host replays."""

    trace: str = ""
    """A trace file; empty: generate one."""
    presets: tuple[str, ...] = ("r2e",)
    sibling: float = 0.69
    outcome: float = 0.2
    drift: float = 1.0
    prompts: Annotated[int, msgspec.Meta(ge=1)]
    """Prompts of the whole run."""
    group: Annotated[int, msgspec.Meta(ge=1)]
    max_context: int
    """Longest context in tokens."""
    seed: int = 0
    speedup: Positive
