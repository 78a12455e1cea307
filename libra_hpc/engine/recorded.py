"""A calibration from the engine steps that a run has recorded (``rollout.record_steps``), all engines together."""

from __future__ import annotations

from pathlib import Path

from libra_hpc.errors import UserError
from libra_hpc.facts.rundir import RunDir
from libra_hpc.models.step_times.measured import MAX_POINTS, Calibration, StepPoint

from .steplog import read_steps

PATTERN = "logs/attempt-*/*.steps.jsonl"


def recorded(run: RunDir, device: str) -> Calibration:
    """The steps of ``run``, at most `MAX_POINTS` of each TP degree, spread evenly; the model is named by its folder.

    Raises `UserError` when there are none, or a log cannot be read.
    """
    points: dict[int, list[StepPoint]] = {}
    capacity: dict[int, int] = {}
    for path in sorted(run.path.glob(PATTERN)):
        header, steps = read_steps(path)
        points.setdefault(header.tp, []).extend(steps)
        # The smallest cache: every engine has at least that.
        capacity[header.tp] = min(header.kv_tokens, capacity.get(header.tp, header.kv_tokens))
    if not any(points.values()):
        raise UserError(
            f"{run.path} has no recorded engine steps; set rollout.record_steps = true in its run file before it"
            " starts."
        )
    model = Path(str(run.read_json(run.config).get("model", {}).get("path", ""))).name
    thinned = [point for steps in points.values() for point in steps[:: -(-len(steps) // MAX_POINTS)]]
    return Calibration(device=device, model=model, kv_capacity=capacity, points=thinned)
