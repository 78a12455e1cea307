"""Figures of a scheduling policy from a live run: functions of `trajectories.jsonl` and the engines' step logs.

The runs are synchronous (``eta = 0``): batch b has the prompts ``b * prompts .. (b + 1) * prompts - 1``, and nothing is
trained meanwhile.  So the time from the first start to the last end of a batch is the rollout's alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import fmean, median
from typing import Any

import msgspec

from libra_hpc.errors import OperationError
from libra_hpc.models.step_times.measured import StepPoint
from libra_hpc.simulator.result import quantiles

Line = dict[str, Any]
"""A line of `trajectories.jsonl`."""


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one phase of one run."""

    policy: str
    seed: int
    phase: str
    batches: int
    batch_s: float
    """First start to last end, median over the batches."""
    p50_s: float
    """Start to end of a trajectory; the same for p95 and p99."""
    p95_s: float
    p99_s: float
    tokens_per_s: float
    """Generated tokens per second of rollout."""
    moves: float
    """Turns on another engine than the turn before, per batch."""
    reprefilled: float
    """Context tokens of those turns, per batch, whether or not siblings had cached them there."""
    turns: float
    """Per batch."""
    shares: dict[str, float]
    """Engine -> share of the turns."""
    reward: float


def figures(policy: str, *, seed: int, phase: str, lines: Sequence[Line], prompts: int) -> Figures:
    """Figures of the trajectories of whole batches of ``prompts`` prompts; raises `OperationError` without any."""
    if not lines:
        raise OperationError(f"{policy}, seed {seed}: no trajectory of phase {phase!r} has ended")
    batches: dict[int, list[Line]] = {}
    for line in lines:
        batches.setdefault(line["index"] // prompts, []).append(line)
    spans = [
        max(line["finished_at"] for line in batch) - min(line["started_at"] for line in batch)
        for batch in batches.values()
    ]
    completion = quantiles([line["finished_at"] - line["started_at"] for line in lines])
    left = [tokens for line in lines for tokens in moved(line)]
    engines = Counter(turn["engine"] for line in lines for turn in line["turns"])
    generated = sum(turn["gen_tokens"] for line in lines for turn in line["turns"])
    count = len(batches)
    return Figures(
        policy=policy,
        seed=seed,
        phase=phase,
        batches=count,
        batch_s=median(spans),
        p50_s=completion.p50,
        p95_s=completion.p95,
        p99_s=completion.p99,
        tokens_per_s=generated / sum(spans),
        moves=len(left) / count,
        reprefilled=sum(left) / count,
        turns=engines.total() / count,
        shares={name: engines[name] / engines.total() for name in sorted(engines)},
        reward=fmean(line["reward"] for line in lines),
    )


def moved(line: Line) -> list[int]:
    """Per move of a trajectory, the context tokens before the last tool's answer."""
    context, last, out = line["prompt_tokens"], "", []
    for turn in line["turns"]:
        if last and turn["engine"] != last:
            out.append(context)
        last = turn["engine"]
        context += turn["new_tokens"] + turn["gen_tokens"]
    return out


def by_phase(lines: Iterable[Line], prompts: int, warm_up: int) -> dict[str, list[Line]]:
    """Lines before and after the drift of the task mix, without the first ``warm_up`` batches of each phase."""
    phases: dict[str, list[Line]] = {}
    for line in lines:
        phases.setdefault("long prompts" if line["info"]["after_drift"] else "long chains", []).append(line)
    out = {}
    for name, found in sorted(phases.items()):
        first = min(line["index"] for line in found) // prompts + warm_up
        out[name] = [line for line in found if line["index"] // prompts >= first]
    return out


def step_ms(points: Sequence[StepPoint]) -> float:
    """Median milliseconds of an engine's steps without prefill."""
    return 1e3 * median([point.seconds for point in points if not point.prefill])


def table(found: Sequence[Figures], policies: Sequence[str], degrees: dict[str, int]) -> list[list[Any]]:
    """Rows by phase and figure: medians over the seeds, and ratios of the first policy to each other."""
    rows: list[list[Any]] = []
    names = {
        "batch_s": "rollout of a batch, s",
        "p50_s": "completion p50, s",
        "p95_s": "completion p95, s",
        "p99_s": "completion p99, s",
        "tokens_per_s": "tokens/s",
        "turns": "turns per batch",
        "moves": "moves per batch",
        "reprefilled": "re-prefilled per batch",
        "reward": "reward",
    }
    for phase in dict.fromkeys(one.phase for one in found):
        of = {(one.policy, one.seed): one for one in found if one.phase == phase}
        for field, name in names.items():
            values = {key: float(getattr(one, field)) for key, one in of.items()}
            rows.append([f"{phase}  {name}", *_cells(values, policies)])
        for engine, tp in degrees.items():
            values = {key: one.shares.get(engine, 0.0) for key, one in of.items()}
            rows.append([f"{phase}  share of turns at TP={tp}", *_cells(values, policies)])
    return rows


def _cells(values: dict[tuple[str, int], float], policies: Sequence[str]) -> list[Any]:
    """Medians of all policies; then median and range over the seeds of first policy / other (``-`` without any)."""
    first, *others = policies
    cells: list[Any] = [median([value for (policy, _), value in values.items() if policy == name]) for name in policies]
    for other in others:
        ratios = [
            value / values[other, seed]
            for (policy, seed), value in values.items()
            if policy == first and values.get((other, seed))
        ]
        cells.append(f"{median(ratios):.2f} ({min(ratios):.2f}..{max(ratios):.2f})" if ratios else "-")
    return cells
