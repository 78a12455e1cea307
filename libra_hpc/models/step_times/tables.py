"""Step times composed of measured operator times.

A table has, per system, model and tensor-parallel degree, the times of a step's parts on a grid; a step is their sum
(`Parts`). ``python -m bench.tabulate`` makes the files in ``tables/``.

- Between grid points all is linear, and non-decreasing.
- Decode attention is fitted by ``a(batch) + b(batch) * kv_tokens``, over contexts that the replica can hold.
  Measurements are linear to a few per cent; a simulator can then take many steps at once.
- A device with other links (A800, H800) has the same compute. The latency of its all-reduces stays; the rest is
  scaled by the ratio of link bandwidths.
- Times are device time; the host's work comes on top (`Device.host_s`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import cache, lru_cache
from pathlib import Path

import msgspec

from libra_hpc.files import read_named
from libra_hpc.models.devices import Device, kv_capacity
from libra_hpc.models.shapes import ModelShape

from .curves import StepCurve, isotonic

FOLDER = Path(__file__).with_name("tables")
MICRO = 1e-6
FIT_POINTS = 4
"""Fewest contexts in the fit of decode attention, even if the replica cannot hold them."""
CACHE = 1 << 16
"""Most cached interpolations of token counts and prompt chunks."""


class Provenance(msgspec.Struct, frozen=True):
    tool: str
    version: str
    system: str
    backend: str
    backend_version: str
    date: str


class Parts(msgspec.Struct, frozen=True):
    """Operator times of one tensor-parallel degree, microseconds per step.

    ``layers``: all products, norms, activations and experts. ``reduce``: all-reduces of tensor parallelism. ``head``:
    output projection. The grids are those of `OperatorTable`.
    """

    experts: str
    """Sharding of a mixture of experts: ``tensor`` | ``expert``; empty: dense."""
    estimated: tuple[str, ...]
    """Operators not taken from measurements alone."""
    layers: tuple[float, ...]
    reduce: tuple[float, ...]
    head: tuple[float, ...]
    decode_attention: tuple[tuple[float, ...], ...]
    prefill_attention: tuple[tuple[float, ...], ...]


class OperatorTable(msgspec.Struct, frozen=True):
    """One file: a system and model, its grids, and the times of each degree."""

    provenance: Provenance
    model: str
    intra_bytes_s: float
    """Link bandwidth of the measured system, one direction."""
    tokens: tuple[int, ...]
    """Grid of ``layers`` and ``reduce``: tokens in the step, decodes and prompt tokens alike."""
    batches: tuple[int, ...]
    """Grid of ``head`` (rows of logits) and rows of ``decode_attention`` (sequences)."""
    contexts: tuple[int, ...]
    """Columns of ``decode_attention``: tokens of each sequence."""
    news: tuple[int, ...]
    """Rows of ``prefill_attention``: new tokens of one sequence."""
    cached: tuple[int, ...]
    """Columns of ``prefill_attention``: its cached context."""
    degrees: dict[int, Parts]


_decoder = msgspec.json.Decoder(OperatorTable)


@cache
def available() -> dict[tuple[str, str], Path]:
    """Table files by (system, model)."""
    return {
        (system, model): path
        for path in sorted(FOLDER.glob("*.json"))
        for system, _, model in [path.stem.partition("_")]
    }


@cache
def load_table(path: Path) -> OperatorTable:
    return read_named("operator table", path, _decoder, "a file written by bench.tabulate")


class TableTimes:
    """`StepTimes` of ``shape`` on ``tp`` devices from an operator table.

    Raises `UserError` for a ``tp`` that does not shard the model.
    """

    def __init__(self, table: OperatorTable, device: Device, shape: ModelShape, tp: int) -> None:
        self.tp = tp
        self.kv_capacity = kv_capacity(device, shape, tp)
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
        self._layers_at = lru_cache(CACHE)(StepCurve(table.tokens, [MICRO * us for us in isotonic(tokens_us)]))
        self._head = StepCurve(table.batches, [MICRO * us for us in isotonic(parts.head)])
        self._fit_decode(table, parts, shape.kv_ratio)
        self._host, self._host_sequence = device.host_s, device.host_sequence_s
        self._cached = list(table.cached)
        self._prefill_curves = [StepCurve(table.news, column) for column in _prefill_columns(parts)]
        self._prefill_row = lru_cache(CACHE)(self._prefill_row_of)
        self._decode_terms = lru_cache(CACHE)(self._decode_terms_of)

    def _fit_decode(self, table: OperatorTable, parts: Parts, kv_ratio: float) -> None:
        layers, head = self._layers_at, self._head
        # As many as caches of the measured type hold.
        capacity, bases, slopes = kv_ratio * self.kv_capacity, [], []
        for batch, row in zip(table.batches, parts.decode_attention, strict=True):
            fitting = max(FIT_POINTS, sum(batch * context <= capacity for context in table.contexts))
            contexts, seconds = table.contexts[:fitting], [MICRO * us for us in row[:fitting]]
            rest = layers(batch) + head(batch)
            base, slope = fit_line(contexts, seconds, [1 / (rest + own) for own in seconds])
            bases.append(base)
            # A decode reads its whole context: it takes the time of the bytes.
            slopes.append(kv_ratio * slope)
        self._attention_base = StepCurve(table.batches, isotonic(bases))
        # The slope per token of *each* sequence grows with the batch: its interpolation is monotone.
        self._attention_slope = StepCurve(table.batches, isotonic(slopes))

    def _decode_terms_of(self, decodes: int) -> tuple[float, float, float]:
        """Base seconds of a decode step, seconds per KV token, and the decodes' own share of the base (attention,
        host).
        """
        if not decodes:
            return self._host, 0.0, self._host
        own = self._attention_base(decodes) + self._host + decodes * self._host_sequence
        return self._layers_at(decodes) + self._head(decodes) + own, self._attention_slope(decodes) / decodes, own

    def _prefill_row_of(self, prefill: int) -> StepCurve:
        return StepCurve(self._cached, [curve(prefill) for curve in self._prefill_curves])

    def step_s(self, decodes: int, kv_tokens: int, prefill: int = 0, context: int = 0) -> float:
        base, slope, own = self._decode_terms(decodes)
        if prefill:
            row = self._prefill_row(prefill)
            at = bisect_right(self._cached, context) - 1
            prompt = row.ys[at] + (context - self._cached[at]) * row.slopes[at]
            base = self._layers_at(decodes + prefill) + self._head(decodes + 1) + own + prompt
        return base + slope * kv_tokens


def fit_line(xs: Sequence[float], ys: Sequence[float], weights: Sequence[float]) -> tuple[float, float]:
    """Non-negative ``(a, b)`` that minimise ``sum((weights * (a + b * xs - ys))**2)``."""
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
    """Seconds of prefill attention over ``news``, one list per cached context, non-decreasing in both."""
    rows: list[list[float]] = []
    for raw in parts.prefill_attention:
        row = [MICRO * us for us in isotonic(raw)]
        rows.append([max(pair) for pair in zip(row, rows[-1], strict=True)] if rows else row)
    return [list(column) for column in zip(*rows, strict=True)]
