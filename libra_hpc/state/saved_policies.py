"""The exported policies of a run, and which of them a user means: ``eval --step``."""

from __future__ import annotations

import math
from pathlib import Path

from libra_hpc.errors import invalid
from libra_hpc.facts import series
from libra_hpc.facts.rundir import RunDir

from .attempt import best_step

LAST, BEST = "last", "best"


def saved_policies(run: RunDir) -> dict[int, Path]:
    """Folders of exported policies by step: those of checkpoints, or without any the one at the end of the run."""
    found = {step: folder / "policy" for step, folder in run.complete_checkpoints()}
    if not found and (run.policy / "config.json").exists():
        # Only then: it is of the last completed attempt, and a resume may have gone on since.
        rows = series.steps(run)
        found[rows[-1]["step"] if rows else 0] = run.policy
    return found


def chosen_policy(run: RunDir, option: str, which: str) -> tuple[int, Path]:
    """Step and folder of the policy that ``which`` names: a step, ``last`` or ``best``.

    The best one is that of ``checkpoint.best``. Without one, it is that of the best smoothed reward in training.
    """
    found, model = saved_policies(run), Path(str(run.resolved().get("model", {}).get("path", "")))
    if not found:
        raise invalid(option, which, f"{run.name} has no checkpoint and no exported policy", "a run that saved one")
    if which == LAST:
        return max(found.items())
    if (model / "config.json").exists():
        found.setdefault(0, model)
    if which == BEST:
        step = _best(run, option, found)
        return step, found[step]
    if not which.isdigit() or int(which) not in found:
        raise invalid(option, which, f"{run.name} has no policy of that step", [LAST, BEST, *map(str, found)])
    return int(which), found[int(which)]


def _best(run: RunDir, option: str, found: dict[int, Path]) -> int:
    evaluated = best_step(run, str(run.resolved().get("checkpoint", {}).get("best", "")))
    if evaluated >= 0:
        before = [step for step in found if 0 < step <= evaluated or step == evaluated]
        if not before:
            why = f"the best evaluation is of step {evaluated}, and {run.name} has no checkpoint of it or before"
            raise invalid(option, BEST, why, LAST)
        return max(before)
    rows = series.steps(run)
    smoothed = series.smooth(series.column(rows, "reward"))
    rewards = {row["step"]: value for row, value in zip(rows, smoothed, strict=False) if math.isfinite(value)}
    return max(found, key=lambda step: (rewards.get(step, -math.inf), step))
