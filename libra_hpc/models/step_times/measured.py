"""Step times fitted to real engine steps: the calibration file and its model.

A calibration file is JSON: device and model, KV capacity by degree, and the steps. A step takes

    base + per_sequence * decodes + per_kv * kv_tokens + per_prefill * prefill
    + per_pair * prefill * (context + prefill / 2)

seconds, with non-negative coefficients from a robust fit (`fitting`). Step times may jump between batch sizes (CPU,
captured graphs). Then a table over batch sizes replaces the first two terms, if it lowers the cross-validated error
by `MIN_GAIN`.

Finally all coefficients are scaled to the measured total. A robust fit follows the typical step, but a simulator sums
steps, and the sum contains slow ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Literal

import msgspec

from libra_hpc.errors import invalid
from libra_hpc.files import read_named, write_result

from .curves import StepCurve

Format = Literal["libra-hpc calibration 1"]
Count = Annotated[int, msgspec.Meta(ge=0)]
Some = Annotated[int, msgspec.Meta(ge=1)]
MAX_POINTS = 4096
"""Most steps of a fit, spread evenly: a fit takes about a second."""
MIN_POINTS = 8
"""Fewest steps of a degree: more than the five coefficients."""
MIN_BIN = 3
"""Fewest steps of a table entry: their median survives one outlier."""
FOLDS = 5
MIN_GAIN = 0.05
"""Share by which the table must lower the cross-validated error; else the simpler model is used."""
NEGLIGIBLE = 1e-3
"""Error by which the table must win besides, so that it does not fit rounding."""
OUTLIER = 5.0
"""A step counts at most so many times its fitted time in the total, so that one suspended process cannot bend it."""


TERMS = ("base", "per_sequence", "per_kv", "per_prefill", "per_pair")
"""Coefficients of a `Fit`."""


class StepPoint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One measured step: arguments of `StepTimes.step_s`, and wall time in seconds."""

    tp: Some
    decodes: Count
    kv_tokens: Count
    prefill: Count = 0
    context: Count = 0
    seconds: Annotated[float, msgspec.Meta(gt=0)]

    def __post_init__(self) -> None:
        if self.decodes + self.prefill == 0:
            raise ValueError("a step without decodes and prefill")


class Calibration(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Content of a calibration file."""

    device: str
    model: str
    kv_capacity: dict[Some, Some]
    """Tokens of KV cache of a replica, by tensor-parallel degree."""
    points: list[StepPoint]
    format: Format = "libra-hpc calibration 1"

    def check(self, device: str, model: str, path: str | Path) -> None:
        """Raise `UserError` unless device and model (in any case) are those of the file."""
        for field, asked, measured in (("device", device, self.device), ("model", model, self.model)):
            if asked.lower() != measured.lower():
                raise invalid(field, asked, f"the calibration file {path} was measured with another", [measured])


class Fit(msgspec.Struct, frozen=True, kw_only=True):
    """The fitted model of one degree, and its errors."""

    base: float
    per_sequence: float
    per_kv: float
    per_prefill: float
    per_pair: float
    batches: tuple[tuple[int, float], ...] = ()
    """(batch size, seconds), replacing ``base + per_sequence * decodes``; empty: not needed."""
    points: int = 0
    median_error: float = 0.0
    """Median of \\|fitted / measured - 1\\|, cross-validated over `FOLDS` folds."""
    p90_error: float = 0.0
    """90th percentile of the same."""
    total: float = 1.0
    """Fitted over measured total of all steps, outliers in full."""

    def seconds(self, points: Sequence[StepPoint]) -> list[float]:
        step_s = MeasuredTimes(self, 1, 0, "").step_s
        return [step_s(point.decodes, point.kv_tokens, point.prefill, point.context) for point in points]


_calibration, _fit = msgspec.json.Decoder(Calibration), msgspec.json.Decoder(Fit)
"""The second makes the type whole, for `msgspec.convert`."""


class MeasuredTimes:
    """`StepTimes` from a `Fit`."""

    def __init__(self, fit: Fit, tp: int, kv_capacity: int, source: str) -> None:
        self.tp = tp
        self.kv_capacity = kv_capacity
        self.source = source
        self.fit = fit
        self._base, self._sequence, self._kv, self._prefill, self._pair = (getattr(fit, name) for name in TERMS)
        self._table = StepCurve(*zip(*fit.batches, strict=True)) if fit.batches else None

    def step_s(self, decodes: int, kv_tokens: int, prefill: int = 0, context: int = 0) -> float:
        base = self._base + self._sequence * decodes if self._table is None else self._table(decodes)
        if prefill:
            base += prefill * (self._prefill + self._pair * (context + 0.5 * prefill))
        return base + self._kv * kv_tokens


def save(calibration: Calibration, path: str | Path) -> None:
    """Write the file; raises `UserError` when it cannot be written."""
    write_result(Path(path), msgspec.json.format(msgspec.json.encode(calibration), indent=1))


def load(path: str | Path) -> Calibration:
    """Read a calibration file; raises `UserError` for one that is unreadable, of another format, or with an
    impossible step.
    """
    return read_named("calibration file", Path(path), _calibration, "a file of libra-hpc calibrate engine")


def measured_times(calibration: Calibration, tp: int) -> MeasuredTimes:
    """Fit the steps of degree ``tp``; raises `UserError` when there are fewer than `MIN_POINTS`."""
    points = [point for point in calibration.points if point.tp == tp]
    if tp not in calibration.kv_capacity or not points:
        degrees = map(str, sorted(calibration.kv_capacity))
        raise invalid("tp", tp, "the calibration file has no steps of it", degrees)
    if len(points) < MIN_POINTS:
        raise invalid(f"steps of tp {tp}", len(points), "too few to fit", f"at least {MIN_POINTS}")
    fit = fit_steps(points)
    steps = f"{fit.points} steps of {calibration.model} on {tp} x {calibration.device}"
    source = f"measured: {steps}, median error {fit.median_error:.1%}"
    return MeasuredTimes(fit, tp, calibration.kv_capacity[tp], source)


def fit_steps(points: Sequence[StepPoint]) -> Fit:
    """Fit one degree's steps, with the batch table if it predicts held-out steps better."""
    # Rounded up, so that the stride leaves at most MAX_POINTS.
    points = points[:: -(-len(points) // MAX_POINTS)]
    plain, binned = _held_out(points)
    table = median(binned) < (1 - MIN_GAIN) * median(plain) - NEGLIGIBLE
    errors = sorted(binned if table else plain)
    line = _line(points)
    fit = _with_table(line, points) if table else line
    fitted = list(zip(points, fit.seconds(points), strict=True))
    scale = sum(min(point.seconds, OUTLIER * own) for point, own in fitted) / sum(own for _, own in fitted)
    return Fit(
        **{name: scale * getattr(fit, name) for name in TERMS},
        batches=tuple((batch, seconds * scale) for batch, seconds in fit.batches),
        points=len(points),
        median_error=median(errors),
        p90_error=errors[int(0.9 * len(errors))],
        total=scale * sum(own for _, own in fitted) / sum(point.seconds for point in points),
    )


def _held_out(points: Sequence[StepPoint]) -> tuple[list[float], list[float]]:
    """Relative errors of the line and of the table on held-out steps."""
    errors: tuple[list[float], list[float]] = [], []
    for fold in range(FOLDS):
        seen, left_out = [point for i, point in enumerate(points) if i % FOLDS != fold], points[fold::FOLDS]
        line = _line(seen)
        for out, fit in zip(errors, (line, _with_table(line, seen)), strict=True):
            fitted = zip(fit.seconds(left_out), left_out, strict=True)
            out += [abs(seconds / point.seconds - 1) for seconds, point in fitted]
    return errors


def _line(points: Sequence[StepPoint]) -> Fit:
    # numpy, which sixty simulated engines on one machine need not load.
    from .fitting import robust_fit

    rows = [(1.0, p.decodes, p.kv_tokens, p.prefill, p.prefill * (p.context + 0.5 * p.prefill)) for p in points]
    found = robust_fit(rows, [point.seconds for point in points])
    return msgspec.convert(dict(zip(TERMS, found, strict=True)), Fit)


def _with_table(line: Fit, points: Sequence[StepPoint]) -> Fit:
    bins: dict[int, list[float]] = {}
    for point, fitted in zip(points, line.seconds(points), strict=True):
        own = line.base + line.per_sequence * point.decodes + point.seconds - fitted
        bins.setdefault(point.decodes, []).append(own)
    # A negative remainder is an error of the other coefficients.
    entries = [(batch, max(0.0, median(rest))) for batch, rest in sorted(bins.items()) if len(rest) >= MIN_BIN]
    # Beyond the largest batch the line's slope continues.
    beyond = [(2 * batch + 1, seconds + line.per_sequence * (batch + 1)) for batch, seconds in entries[-1:]]
    return msgspec.structs.replace(line, batches=(*entries, *beyond))
