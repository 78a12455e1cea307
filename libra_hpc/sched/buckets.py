"""Buckets: the engines of one tensor-parallel degree, ordered by latency per token (ascending TP), and what their steps cost.

A bucket's index is the *level* of a trajectory in it.  Levels come from the engines present at a call, so nothing has to be told when a node
joins or leaves the stage.

An engine's costs are measured when it has reported any, otherwise derived.  Decoding one token and prefilling one token cost less with more
devices, but by less than their number, because of communication and of work that does not shrink: over A100 and H200 operator tables of 8B to
32B models, going from TP 1 to TP 8 speeds up either by 3.3 to 5 times.  `TP_EXPONENT` = 0.65 (8 ** 0.65 = 3.9) carries a known cost to a class
that has none yet.  While nothing at all is measured, `DECODE_S` = 0.02 s and `PREFILL_S` = 1e-4 s a token stand in at TP 1 (a 14B model on an
A100); only their ratio, 200, matters then.

`LOAD_SHARE` = 0.5 is the part of a decode step taken to grow in proportion to the KV tokens in flight, at the bucket's mean load: 0 would be a purely
weight-bound step, 1 a purely KV-bound one.  It spreads load between two measurements, which come twice a second, while the leader's own counts are exact.
"""

from __future__ import annotations

from collections.abc import Sequence

from libra_hpc.sched.protocol import EngineView

TP_EXPONENT = 0.65
DECODE_S = 0.02
PREFILL_S = 1e-4
LOAD_SHARE = 0.5


def tp_classes(engines: Sequence[EngineView]) -> list[int]:
    """Ascending TP degrees present; the index in it is the level."""
    return sorted({engine.tp for engine in engines})


class Bucket:
    """One TP class at one moment: its number of engines and the mean cost of their steps."""

    __slots__ = ("decode_s", "engines", "level", "mean_tokens", "prefill_s", "tp")

    def __init__(self, tp: int) -> None:
        self.tp = tp
        self.level = self.engines = 0
        self.mean_tokens = self.decode_s = self.prefill_s = 0.0

    def decode_cost(self, engine: EngineView, context: int) -> float:
        """Seconds per decoded token of a turn of ``context`` tokens at ``engine``.

        The class's mean step, corrected by this engine's load; beyond the KV capacity sequences take turns, so time stretches by the excess.
        """
        tokens = engine.inflight_tokens
        scale = max(self.mean_tokens, 1.0)
        step = self.decode_s * (1.0 + LOAD_SHARE * (tokens - self.mean_tokens) / scale)
        demand = (tokens + context) / engine.kv_capacity
        return step * demand if demand > 1.0 else step


def buckets(engines: Sequence[EngineView]) -> dict[int, Bucket]:
    """The bucket of each TP degree, ascending, every cost filled in: measured, else scaled from the nearest measured class, else the stand-in.

    One pass over the engines: this runs for every turn.
    """
    found: dict[int, Bucket] = {}
    sums: dict[int, list[float]] = {}
    for engine in engines:
        tp = engine.tp
        bucket = found.get(tp)
        if bucket is None:
            bucket = found[tp] = Bucket(tp)
            sums[tp] = [0.0, 0.0, 0.0, 0.0]
        bucket.engines += 1
        bucket.mean_tokens += engine.inflight_tokens
        measured = sums[tp]
        if engine.decode_s > 0.0:
            measured[0] += engine.decode_s
            measured[1] += 1.0
        if engine.prefill_s > 0.0:
            measured[2] += engine.prefill_s
            measured[3] += 1.0
    ordered = {tp: found[tp] for tp in sorted(found)}
    for level, (tp, bucket) in enumerate(ordered.items()):
        decode, decodes, prefill, prefills = sums[tp]
        bucket.level = level
        bucket.mean_tokens /= bucket.engines
        bucket.decode_s = decode / decodes if decodes else _scaled(tp, [(t, s[0] / s[1]) for t, s in sums.items() if s[1]], DECODE_S)
        bucket.prefill_s = prefill / prefills if prefills else _scaled(tp, [(t, s[2] / s[3]) for t, s in sums.items() if s[3]], PREFILL_S)
    return ordered


def _scaled(tp: int, known: list[tuple[int, float]], stand_in: float) -> float:
    at, cost = min(known, key=lambda pair: max(pair[0] / tp, tp / pair[0])) if known else (1, stand_in)
    return cost * float((at / tp) ** TP_EXPONENT)
