"""Accuracy of the planner's step times: its estimates against the measured steps.

- eta + 1 batches in flight complete in bursts -> means over `BLOCK` steps in a row are compared.
- A step without an estimate, for example right after a move -> it does not count.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, median

import msgspec

from . import series

BLOCK = 8
"""Steps that are compared as one.  With 4 the bursts show; with 16 the status is about the past."""


class StageEstimate(msgspec.Struct, frozen=True):
    """Expected seconds per global batch at the present split."""

    train_s: float
    rollout_s: float
    batch_s: float
    """The slower stage, or the sum of both where they take turns."""


class StepAccuracy(msgspec.Struct, frozen=True):
    """Expected and measured seconds of the steps that had an estimate."""

    steps: int
    expected_s: float
    """Mean over ``steps`` of the last estimate before each commit."""
    measured_s: float
    """Mean over ``steps`` of the time from commit to commit."""
    error: float
    """Median over blocks of `BLOCK` steps of |expected / measured - 1|."""


def step_accuracy(steps: Sequence[series.Record]) -> StepAccuracy | None:
    """Accuracy over lines of ``metrics.jsonl`` in order of steps; None without any estimate."""
    pairs = [(series.number(row, "expected_s"), series.number(row, "step_s")) for row in steps]
    known = [(expected, measured) for expected, measured in pairs if math.isfinite(expected) and measured > 0.0]
    if not known:
        return None
    blocks = [known[max(0, end - BLOCK) : end] for end in range(len(known), min(BLOCK, len(known)) - 1, -BLOCK)]
    errors = [abs(sum(e for e, _ in block) / sum(m for _, m in block) - 1.0) for block in blocks]
    return StepAccuracy(
        steps=len(known),
        expected_s=fmean(e for e, _ in known),
        measured_s=fmean(m for _, m in known),
        error=median(errors),
    )


def estimate_line(estimate: StageEstimate) -> str:
    """The present estimate as a line for a screen."""
    stages = f"train {estimate.train_s:.2f} s, rollout {estimate.rollout_s:.2f} s"
    return f"planner expects {estimate.batch_s:.2f} s a step ({stages})"


def accuracy_line(accuracy: StepAccuracy) -> str:
    """Expected against measured seconds as a line for a screen."""
    error = f"error {accuracy.error:.0%}" + (f" (median of blocks of {BLOCK})" if accuracy.steps > BLOCK else "")
    steps = "1 step" if accuracy.steps == 1 else f"{accuracy.steps} steps"
    return (
        f"planner expected {accuracy.expected_s:.2f} s, measured {accuracy.measured_s:.2f} s (mean of {steps}), {error}"
    )
