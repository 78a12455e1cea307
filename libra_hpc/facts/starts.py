"""When the ranks of a run were at work: its starts, and the time in the queue between attempts.

A run starts once, again in the same job after a repartition or the loss of a leader, and again in a further job.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import msgspec

from .series import Record, column


class RunStart(msgspec.Struct, frozen=True):
    """All ranks from the first that joined to their end; times are epoch seconds."""

    attempt: int
    start: float
    end: float
    ranks: int
    state: str
    """How the attempt ended; empty for a start that another one followed in the same job, and while it runs."""
    message: str
    queued_s: float
    """Seconds without a job since the start before; 0.0 for a start in the same job."""


def starts(rows: Sequence[Record], log: Sequence[Record]) -> list[RunStart]:
    """The starts of a run in order, from its steps and its events.  A killed one ends with its last line."""
    times = sorted([event["t"] for event in log] + [t for t in column(rows, "t") if math.isfinite(t)])
    if not times:
        return []
    begins = _begins(log)
    if not begins:
        return [RunStart(1, times[0], times[-1], 0, "", "", 0.0)]
    found: list[RunStart] = []
    for (begin, event), (following, _) in pairwise([*begins, (math.inf, {})]):
        killed = {"t": max(t for t in times if begin <= t < following), "state": ""}
        end = next((e for e in log if e["kind"] == "job_finished" and begin <= e["t"] < following), killed)
        found.append(_start(event, begin, end, found[-1] if found else None))
    return found


def _start(event: Record, begin: float, end: Record, before: RunStart | None) -> RunStart:
    attempt = _whole(event, "attempt", 1)
    queued = before is not None and (before.state != "" or before.attempt != attempt)
    return RunStart(
        attempt=attempt,
        start=begin,
        end=end["t"],
        ranks=_whole(event, "ranks", 0),
        state=str(end.get("state", "completed")),
        message=str(end.get("message", "")),
        queued_s=begin - before.end if before is not None and queued else 0.0,
    )


def job_seconds(found: Sequence[RunStart]) -> float:
    """Seconds in which the run had nodes, restarts inside a job included."""
    return found[-1].end - found[0].start - sum(start.queued_s for start in found) if found else 0.0


def job_gpus(config: Mapping[str, Any]) -> int:
    """GPUs that the job of a configuration occupies; ``config`` as in config.json, whatever its version."""
    components = config.get("components")
    return sum(
        each["nodes"] * each["gpus"]
        for each in (components.values() if isinstance(components, Mapping) else ())
        if isinstance(each, Mapping) and all(isinstance(each.get(key), int) for key in ("nodes", "gpus"))
    )


def _begins(log: Sequence[Record]) -> list[tuple[float, Record]]:
    """Time and ``job_started`` event of each start; the ranks join right before that event."""
    found: list[tuple[float, Record]] = []
    joined: float | None = None
    for event in log:
        if event["kind"] == "job_started":
            found.append((event["t"] if joined is None else joined, event))
        if event["kind"] == "mpi_world":
            continue
        if event["kind"] != "agent_joined":
            joined = None
        elif joined is None:
            joined = event["t"]
    return found


def _whole(event: Record, key: str, default: int) -> int:
    value = event.get(key)
    return value if isinstance(value, int) else default
