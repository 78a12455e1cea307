"""How well the prompt, tool results and attained service predict the remaining work, on one trace.

* Prompt: similarity of siblings in turns, generated tokens, and their log (the raw scale depends on the few longest).
* Signals: tool results after turn k against the log of the remaining tokens, *within* equal k, pooled over k.  So a
  signal gains nothing from the progress of the trajectory.
* Attained service: mean remaining tokens of trajectories with more than a.  If it rises with a,
  least-attained-service scheduling gains.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TypeVar

import msgspec

from libra_hpc.protocol.trace import TrajectoryRecord, payload_of

from .trace_stats import OneWay, centred, one_way, pearson

T = TypeVar("T")

FEW = 20
"""Fewest trajectories at turn k, or above a threshold: the mean of fewer would be noise."""
TREND = 1.25
"""Ratio of mean residuals that counts as a rise; its inverse counts as a fall."""
TREND_ALIVE = 0.05
"""The trend is evaluated at the largest threshold that this share of the trajectories exceeds."""


class Prompt(msgspec.Struct, frozen=True):
    """Similarity of siblings in one quantity, over groups of at least two samples."""

    quantity: str
    groups: int
    n: int
    anova: OneWay
    r_siblings: float | None
    r_probe: float | None
    """Correlation of the lowest sample of a group with each of the others."""


class SignalStrength(msgspec.Struct, frozen=True):
    """How well one signal predicts the log of the remaining tokens, at equal turn."""

    signal: str
    measure: str
    """``eta2`` (share of variance explained by classes) or ``r`` (correlation)."""
    value: float | None
    """None: not determined; ``note`` has the reason."""
    share: float | None
    """Share of variance explained, comparable between signals: epsilon2 for eta2, r squared for r."""
    n: int
    note: str = ""


class Residual(msgspec.Struct, frozen=True):
    """Mean remaining work of the trajectories that generated more than ``attained`` tokens."""

    attained: int
    n: int
    mean_tokens: float
    mean_turns: float


class Prediction(msgspec.Struct, frozen=True):
    prompt: list[Prompt]
    """Empty: no siblings."""
    signals: list[SignalStrength]
    residual: list[Residual]
    trend: str
    """``rises`` | ``falls`` | ``flat`` | ``too few``"""


class _Point(msgspec.Struct):
    """A tool return."""

    turn: int
    left: float
    """Log of the remaining tokens."""
    tool: str | None
    outcome: str | None
    failed: int | None
    streak: int
    """Consecutive tool returns, up to this one, that were not ``ok``."""
    payload: int
    attained: int


def predict(trajectories: Sequence[TrajectoryRecord]) -> Prediction:
    residual = _residual(trajectories)
    return Prediction(
        _prompt(trajectories), _signals(list(_points(trajectories))), residual, _trend(residual, len(trajectories))
    )


def _prompt(trajectories: Sequence[TrajectoryRecord]) -> list[Prompt]:
    groups: dict[str, list[TrajectoryRecord]] = {}
    for one in trajectories:
        groups.setdefault(one.prompt_id, []).append(one)
    families = [sorted(members, key=lambda one: one.sample) for members in groups.values() if len(members) > 1]
    quantities: tuple[tuple[str, Callable[[TrajectoryRecord], float]], ...] = (
        ("turns", lambda one: float(len(one.turns))),
        ("generated", lambda one: float(one.generated)),
        ("log generated", lambda one: math.log(one.generated)),
    )
    result = []
    for name, quantity in quantities:
        values = [[quantity(one) for one in members] for members in families]
        anova = one_way((0, index, value) for index, members in enumerate(values) for value in members)
        if anova is None:
            continue
        others = [((sum(members) - value) / (len(members) - 1), value) for members in values for value in members]
        probes = [(members[0], value) for members in values for value in members[1:]]
        result.append(
            Prompt(
                quantity=name,
                groups=len(families),
                n=len(others),
                anova=anova,
                r_siblings=pearson(others),
                r_probe=pearson(probes),
            )
        )
    return result


def _points(trajectories: Sequence[TrajectoryRecord]) -> Iterator[_Point]:
    """Tool returns, at turns that at least `FEW` trajectories reach."""
    reach = sorted((len(one.turns) for one in trajectories), reverse=True)
    last = reach[FEW - 1] - 1 if len(reach) >= FEW else 0
    for one in trajectories:
        attained, streak, generated = 0, 0, one.generated
        for index, turn in enumerate(one.turns[:-1]):
            attained += turn.gen_tokens
            streak = streak + 1 if turn.outcome not in (None, "ok") else 0
            if index < last:
                payload = payload_of(one.turns[index + 1])
                yield _Point(
                    turn=index,
                    left=math.log(generated - attained),
                    tool=turn.tool,
                    outcome=turn.outcome,
                    failed=turn.failed,
                    streak=streak,
                    payload=payload,
                    attained=attained,
                )


def _signals(points: Sequence[_Point]) -> list[SignalStrength]:
    with_outcome = [point for point in points if point.outcome is not None]
    classes = {point.outcome for point in with_outcome}
    tested = [point for point in points if point.failed is not None]
    result = []
    if len(classes) > 1:
        result.append(_classes("last outcome", _rows(with_outcome, lambda point: point.outcome)))
        result.append(_classes("last tool and outcome", _rows(with_outcome, lambda point: (point.tool, point.outcome))))
        result.append(_correlated("error streak", _rows(with_outcome, lambda point: float(point.streak))))
    else:
        note = f"every outcome is {classes.pop()!r}" if classes else "no outcomes"
        result.append(
            SignalStrength(
                signal="last outcome", measure="eta2", value=None, share=None, n=len(with_outcome), note=note
            )
        )
    if tested:
        result.append(_correlated("failed tests", _rows(tested, lambda point: float(point.failed or 0))))
    result.append(_correlated("log payload", _rows(points, lambda point: math.log1p(point.payload))))
    result.append(_correlated("log attained", _rows(points, lambda point: math.log(point.attained))))
    return result


def _rows(points: Sequence[_Point], value: Callable[[_Point], T]) -> list[tuple[int, T, float]]:
    """(turn, value, log of the tokens left) of every point."""
    return [(point.turn, value(point), point.left) for point in points]


def _classes(name: str, rows: Sequence[tuple[int, Hashable, float]]) -> SignalStrength:
    anova = one_way(rows)
    if anova is None:
        return SignalStrength(signal=name, measure="eta2", value=None, share=None, n=len(rows), note="too few")
    return SignalStrength(signal=name, measure="eta2", value=anova.eta2, share=anova.epsilon2, n=len(rows))


def _correlated(name: str, rows: Sequence[tuple[int, float, float]]) -> SignalStrength:
    r = pearson(centred(rows))
    note = "" if r is not None else "no turn before the last" if not rows else "constant, or too few"
    share = None if r is None else r * r
    return SignalStrength(signal=name, measure="r", value=r, share=share, n=len(rows), note=note)


def _residual(trajectories: Sequence[TrajectoryRecord]) -> list[Residual]:
    lengths = [one.generated for one in trajectories]
    thresholds = [0, *(digit * 10**power for power in range(1, 8) for digit in (1, 2, 5))]
    result: list[Residual] = []
    for attained in thresholds:
        alive = [one for one, length in zip(trajectories, lengths, strict=True) if length > attained]
        if len(alive) < min(FEW, len(trajectories)) or not alive:
            break
        if result and len(alive) > 0.9 * result[-1].n:
            continue  # nearly the same trajectories again
        mean_turns = sum(_turns_left(one, attained) for one in alive) / len(alive)
        result.append(
            Residual(attained, len(alive), sum(one.generated - attained for one in alive) / len(alive), mean_turns)
        )
    return result


def _turns_left(one: TrajectoryRecord, attained: int) -> float:
    """Remaining turns, the current one counted by its remaining share."""
    left = 0.0
    done = 0
    for turn in one.turns:
        left += min(max(done + turn.gen_tokens - attained, 0) / turn.gen_tokens, 1.0)
        done += turn.gen_tokens
    return left


def _trend(residual: Sequence[Residual], n: int) -> str:
    judged = [row for row in residual[1:] if row.n >= max(TREND_ALIVE * n, FEW)]
    if not judged:
        return "too few"
    ratio = judged[-1].mean_tokens / residual[0].mean_tokens
    return "rises" if ratio >= TREND else "falls" if ratio <= 1 / TREND else "flat"
