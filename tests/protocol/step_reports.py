"""Metrics of a step for tests: zero but for what a test names."""

from __future__ import annotations

from libra_hpc.facts.columns import BATCH, STEP, TRAINING
from libra_hpc.protocol.agents import StepReport


def batch_stats(**values: float) -> dict[str, float]:
    """Statistics of a batch."""
    return dict.fromkeys((column.name for column in BATCH), 0.0) | values


def step_report(step: int, **values: float) -> StepReport:
    """The report of a step with every column."""
    zeros = dict.fromkeys((column.name for column in (*BATCH, *STEP, *TRAINING)), 0.0)
    return StepReport(step, zeros | values)
