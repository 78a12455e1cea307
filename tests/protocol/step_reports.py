"""Metrics of a step for tests: zero but for what a test names."""

from __future__ import annotations

from typing import Any

import msgspec

from libra_hpc.protocol.mesh import StepReport
from libra_hpc.protocol.metrics import BatchStats, StepMetrics, TrainMetrics


def batch_stats(**values: float) -> BatchStats:
    """Statistics of a batch."""
    return _zeros(BatchStats, values)


def step_report(step: int, **values: float) -> StepReport:
    """The report of a step; each value goes to the part that has a column of that name."""
    parts: dict[str, Any] = {
        name: _zeros(part, {key: value for key, value in values.items() if key in part.__struct_fields__})
        for name, part in (("batch", BatchStats), ("train", TrainMetrics))
    }
    own = {key: value for key, value in values.items() if key in StepMetrics.__struct_fields__}
    return StepReport(step, _zeros(StepMetrics, parts | own))


def _zeros(part: Any, values: dict[str, Any]) -> Any:
    required = [field.name for field in msgspec.structs.fields(part) if field.required]
    return part(**(dict.fromkeys(required, 0) | values))
