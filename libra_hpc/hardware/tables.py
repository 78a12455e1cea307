"""Step times composed of measured operator times.

A table holds, for one system and model and each tensor-parallel degree, the time of each part of a step on a grid:

* ``layers``: all matrix products, norms, activations and experts, by the tokens in the step (decodes and prompt tokens
  pass the same operators);
* ``reduce``: the all-reduces of tensor parallelism, by the tokens in the step;
* ``head``: the output projection, by rows of logits;
* ``decode_attention``: by sequences and by context of each;
* ``prefill_attention``: by new tokens of one sequence and its cached context.

A step is their sum.  ``python -m libra_hpc.hardware.tabulate`` makes the files under ``tables/`` and writes into each
where its numbers come from.

Between grid points everything is linear.  Decode attention is first fitted by ``a(batch) + b(batch) * kv_tokens`` at
each grid batch, in relative error of the step and over the contexts that the replica can hold: the measurements are
linear in context to a few per cent, and a step that is linear in ``kv_tokens`` lets a simulator take many steps of one
batch at once.  All curves are made non-decreasing.

A device whose links differ from those of the measured system (A800, H800) gets the same compute; of its all-reduces the
latency (the time of the smallest message) stays and the rest grows with the ratio of link bandwidths.

The figures are device time; the host's own work of a step comes on top (`Device.host_s`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import cache, lru_cache
from pathlib import Path

import msgspec

from libra_hpc.errors import invalid

from .capacity import kv_capacity
from .curves import Curve, isotonic
from .devices import Device
from .models import ModelShape

FOLDER = Path(__file__).with_name("tables")
MICRO = 1e-6
FIT_POINTS = 4
"""Contexts that enter the fit of decode attention at least, even if the replica could not hold them."""
CACHE = 1 << 16
"""Token counts and prompt chunks whose interpolation is remembered."""


class Provenance(msgspec.Struct, frozen=True):
    """Where a table's numbers come from."""

    tool: str
    version: str
    system: str
    backend: str
    backend_version: str
    date: str


class Parts(msgspec.Struct, frozen=True):
    """Operator times of one tensor-parallel degree, microseconds per step."""

    experts: str
    """How a mixture of experts was sharded: ``tensor`` | ``expert``; empty for a dense model."""
    estimated: tuple[str, ...]
    """Operators that the tool did not take from measurements alone."""
    layers: tuple[float, ...]
    reduce: tuple[float, ...]
    head: tuple[float, ...]
    decode_attention: tuple[tuple[float, ...], ...]
    prefill_attention: tuple[tuple[float, ...], ...]


class OperatorTable(msgspec.Struct, frozen=True):
    """One file: a system and a model, its grid, and the times of each degree."""

    provenance: Provenance
    model: str
    intra_bytes_s: float
    """Link bandwidth of the measured system, one direction."""
    tokens: tuple[int, ...]
    """Grid of ``layers`` and ``reduce``."""
    batches: tuple[int, ...]
    """Grid of ``head`` and rows of ``decode_attention``."""
    contexts: tuple[int, ...]
    """Columns of ``decode_attention``: tokens of each sequence."""
    news: tuple[int, ...]
    """Rows of ``prefill_attention``."""
    cached: tuple[int, ...]
    """Columns of ``prefill_attention``."""
    degrees: dict[int, Parts]


@cache
def available() -> dict[tuple[str, str], Path]:
    """The files there are, by (system, model)."""
    return {
        (system, model): path
        for path in sorted(FOLDER.glob("*.json"))
        for system, _, model in [path.stem.partition("_")]
    }


@cache
def load_table(path: Path) -> OperatorTable:
    """Read one file; raises `UserError` when it is not an operator table."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=OperatorTable)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise invalid(
            "operator table", str(path), str(error), "a file written by libra_hpc.hardware.tabulate"
        ) from error


class TableTimes:
    """`StepTimes` of ``shape`` on ``tp`` devices, from an operator table.

    Raises `UserError` for a degree the table lacks, a ``tp`` that does not shard the model, and ``memory_util`` outside
    (0, 1].
    """

    def __init__(
        self, table: OperatorTable, device: Device, shape: ModelShape, tp: int, memory_util: float = 0.9
    ) -> None:
        self.tp = tp
        self.kv_capacity = kv_capacity(device, shape, tp, memory_util)
        if tp not in table.degrees:
            raise invalid(
                "tp",
                tp,
                f"the operator table of {table.model} on {table.provenance.system} lacks it",
                sorted(map(str, table.degrees)),
            )
        parts = table.degrees[tp]
        slower = table.intra_bytes_s / device.intra_bytes_s
        link = "" if slower == 1 else f", all-reduces rescaled to links of {device.intra_bytes_s / 1e9:.0f} GB/s"
        made = table.provenance
        measured = f"{made.tool} {made.version}, {made.system}, {made.backend} {made.backend_version}"
        self.source = f"operator tables ({measured}) for {shape.name} on {tp} x {device.name}{link}"
        floor = parts.reduce[0]
        tokens_us = [
            own + floor + (reduce - floor) * slower for own, reduce in zip(parts.layers, parts.reduce, strict=True)
        ]
        self._layers_at = lru_cache(CACHE)(Curve(table.tokens, [MICRO * us for us in isotonic(tokens_us)]))
        self._head = Curve(table.batches, [MICRO * us for us in isotonic(parts.head)])
        self._fit_decode(table, parts)
        self._host, self._host_sequence = device.host_s, device.host_sequence_s
        self._cached = list(table.cached)
        self._prefill_curves = [Curve(table.news, column) for column in _prefill_columns(parts)]
        self._prefill_row = lru_cache(CACHE)(self._prefill_row_of)
        self._decode_terms = lru_cache(CACHE)(self._decode_terms_of)

    def _fit_decode(self, table: OperatorTable, parts: Parts) -> None:
        layers, head = self._layers_at, self._head
        bases, slopes = [], []
        for batch, row in zip(table.batches, parts.decode_attention, strict=True):
            held = max(FIT_POINTS, sum(batch * context <= self.kv_capacity for context in table.contexts))
            contexts, seconds = table.contexts[:held], [MICRO * us for us in row[:held]]
            rest = layers(batch) + head(batch)
            base, slope = fit_line(contexts, seconds, [1 / (rest + own) for own in seconds])
            bases.append(base)
            slopes.append(slope)
        self._attention_base = Curve(table.batches, isotonic(bases))
        # The slope per token of *each* sequence grows with the batch; interpolating that one keeps steps monotone in
        # the batch.
        self._attention_slope = Curve(table.batches, isotonic(slopes))

    def _decode_terms_of(self, decodes: int) -> tuple[float, float, float]:
        """Base seconds of a pure decode step, seconds per KV token, and what of the base is the decodes' own: their
        attention and the host's work."""
        if not decodes:
            return self._host, 0.0, self._host
        own = self._attention_base(decodes) + self._host + decodes * self._host_sequence
        return self._layers_at(decodes) + self._head(decodes) + own, self._attention_slope(decodes) / decodes, own

    def _prefill_row_of(self, prefill: int) -> Curve:
        return Curve(self._cached, [curve(prefill) for curve in self._prefill_curves])

    def step_s(self, decodes: int, kv_tokens: int, prefill: int = 0, context: int = 0) -> float:
        """Seconds of one step; see `StepTimes.step_s`."""
        base, slope, own = self._decode_terms(decodes)
        if prefill:
            row = self._prefill_row(prefill)
            at = bisect_right(self._cached, context) - 1
            prompt = row.ys[at] + (context - self._cached[at]) * row.slopes[at]
            base = self._layers_at(decodes + prefill) + self._head(decodes + 1) + own + prompt
        return base + slope * kv_tokens


def fit_line(xs: Sequence[float], ys: Sequence[float], weights: Sequence[float]) -> tuple[float, float]:
    """Return ``(a, b)``, both non-negative, that minimise ``sum((weights * (a + b * xs - ys))**2)``."""
    squares = [weight * weight for weight in weights]
    total = sum(squares)
    x = sum(w * x for w, x in zip(squares, xs, strict=True)) / total
    y = sum(w * y for w, y in zip(squares, ys, strict=True)) / total
    spread = sum(w * (xi - x) ** 2 for w, xi in zip(squares, xs, strict=True))
    slope = sum(w * (xi - x) * (yi - y) for w, xi, yi in zip(squares, xs, ys, strict=True)) / spread
    if slope < 0:
        return y, 0.0
    if y - slope * x < 0:
        power = sum(w * xi * xi for w, xi in zip(squares, xs, strict=True))
        return 0.0, sum(w * xi * yi for w, xi, yi in zip(squares, xs, ys, strict=True)) / power
    return y - slope * x, slope


def _prefill_columns(parts: Parts) -> list[list[float]]:
    """Seconds of prefill attention, one list over ``news`` per cached context, non-decreasing in both."""
    rows: list[list[float]] = []
    for raw in parts.prefill_attention:
        row = [MICRO * us for us in isotonic(raw)]
        rows.append([max(pair) for pair in zip(row, rows[-1], strict=True)] if rows else row)
    return [list(column) for column in zip(*rows, strict=True)]
