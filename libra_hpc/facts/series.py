"""A run's files as series: metrics by step, phases of the task mix, and moves as intervals.

A run may be young, killed, or written by an older version.  So a missing key is NaN, and an event without its partner
is open-ended.  Times are epoch seconds.

The files of a dry run are in wall time, in which its seconds pass ``speedup`` times faster.  `simulated` makes them
simulated time: screens read a run by `read`, and its status by `facts.status.in_simulated_time`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from .rundir import RunDir, read_lines

Record = Mapping[str, Any]

TOGETHER_S = 0.5
"""Moves of one decision start within milliseconds; two decisions are at least ``planner.interval_s`` apart."""
SMOOTHING = 0.2
"""Weight of the newest step in the smoothed reward; averages over about five steps."""
EVALUATED = "eval/"
PART_REWARD = "/reward"
"""Behind the name of a task of a mixture: the column of its mean reward."""
FIRST_AND_LAST = 0.2
"""Share of the steps averaged for first and last reward: one step is too noisy, a quarter hides a short warm-up."""


SECONDS_IN_WORDS = re.compile(r"(?<![\w.])(?:\d+\.\d+(?!\d| x|%)|\d+(?=(?: to \d+)? s\b))")
"""Seconds in a planner's reason: its other numbers are whole, factors (``1.0 x``) or percentages."""
OF_THE_CLOCK = "heartbeat_age_s"
"""No simulated time: shows whether a node lives."""


class Recorded(NamedTuple):
    """What the files of a run have so far."""

    steps: list[Record]
    log: list[Record]
    start: float
    """Time of its first line; 0.0 without any."""
    end: float
    speedup: float
    """How many times faster than the clock these times passed before they were simulated ones; 1.0: a real run."""

    def since(self, t: float) -> float:
        """A time of the clock as it is in these records."""
        return self.start + (t - self.start) * self.speedup

    def by_clock(self, t: float) -> float:
        """A time of these records by the clock."""
        return self.start + (t - self.start) / self.speedup


class MoveRecord(msgspec.Struct, frozen=True):
    """One node changing stage."""

    rank: int
    to: str
    """``train`` | ``rollout``"""
    reason: str
    start: float
    end: float | None = None
    """None while the move is in flight, or when the job ended in it."""
    seconds: float | None = None
    """Seconds that the node measured, else ``end - start``; None while open."""
    predicted_gain_s: float | None = None
    """Gain that the planner predicted, in seconds per global batch; None when unknown."""
    realised_gain_s: float | None = None
    """Gain in the first complete measurement after it; None until then, and when the workload changed meanwhile."""


def read(run: RunDir) -> Recorded:
    """Steps and events of a run; those of a dry run in simulated time, which begins with its first line."""
    rows, log, speedup = steps(run), events(run), float(run.read_json(run.status).get("speedup", 1.0))
    times = [event["t"] for event in log] + [t for t in column(rows, "t") if math.isfinite(t)]
    found = Recorded(rows, log, min(times, default=0.0), max(times, default=0.0), speedup)
    if speedup == 1.0:
        return found
    scaled: list[list[Record]] = [
        [{**simulated(line, speedup), "t": found.since(number(line, "t"))} for line in part] for part in (rows, log)
    ]
    return found._replace(steps=scaled[0], log=scaled[1], end=found.since(found.end))


def simulated(value: Any, speedup: float, key: str = "") -> Any:
    """A record of a dry run with its seconds and rates in simulated time, by the names of its fields; one of a real
    run as it is."""
    if isinstance(value, Mapping) and speedup != 1.0:
        return {name: simulated(part, speedup, name) for name, part in value.items()}
    if isinstance(value, list):
        return [simulated(part, speedup, key) for part in value]
    if key == "reason" and isinstance(value, str):
        return SECONDS_IN_WORDS.sub(lambda found: _times(found[0], speedup), value)
    if not isinstance(value, (int, float)) or key == OF_THE_CLOCK:
        return value
    return value / speedup if key.endswith("_per_s") else value * speedup if key.endswith(("_s", "seconds")) else value


def _times(text: str, factor: float) -> str:
    """A decimal number times a factor, with as many decimals."""
    return f"{float(text) * factor:.{len(text.partition('.')[2])}f}"


def steps(run: RunDir) -> list[Record]:
    """Metrics in order of step; of a step that was trained twice, the last line.

    The mean of an evaluation stands in the step of its weights, as ``NAME`` behind `EVALUATED`.
    """
    latest: dict[int, Record] = {}
    for record in read_lines(run.metrics):
        step = record.get("step")
        if isinstance(step, int):
            latest[step] = record
    for line in read_lines(run.evaluations):
        if line.get("step") in latest and "mean" in line:
            latest[line["step"]] = {**latest[line["step"]], f"{EVALUATED}{line['task']}": line["mean"]}
    return [latest[step] for step in sorted(latest)]


def events(run: RunDir) -> list[Record]:
    """Events with a time and a kind, oldest first."""
    found = [
        e for e in read_lines(run.events) if isinstance(e.get("t"), (int, float)) and isinstance(e.get("kind"), str)
    ]
    return sorted(found, key=lambda e: e["t"])


def column(rows: Sequence[Record], key: str) -> list[float]:
    """One metric over the rows; NaN where it is missing or no number."""
    return [number(row, key) for row in rows]


def phase(record: Record) -> str:
    """Name of the task mix of a step: whether most episodes were before or after the drift; empty without one."""
    drifted = number(record, "after_drift")
    return "" if math.isnan(drifted) else "after drift" if drifted >= 0.5 else "before drift"


def number(record: Record, key: str, default: float = math.nan) -> float:
    """A numeric field of a record, or ``default``."""
    value = record.get(key)
    return float(value) if isinstance(value, (int, float)) else default


def mean(values: Sequence[float]) -> float:
    """Mean of the finite values; NaN when there is none."""
    finite = [v for v in values if math.isfinite(v)]
    return sum(finite) / len(finite) if finite else math.nan


def known(value: float) -> float | None:
    """None for a value that is not finite, which JSON lacks."""
    return value if math.isfinite(value) else None


def smooth(values: Sequence[float]) -> list[float]:
    """Exponential moving average, corrected for its start; skips NaN values."""
    out: list[float] = []
    total = weight = 0.0
    for value in values:
        if math.isfinite(value):
            total, weight = (1 - SMOOTHING) * total + SMOOTHING * value, (1 - SMOOTHING) * weight + SMOOTHING
        out.append(total / weight if weight else math.nan)
    return out


def moves(log: Sequence[Record]) -> list[MoveRecord]:
    """Moves in order of their start, from ``move_started``, ``move_done`` and ``move_judged`` events.

    Nodes that moved by one decision were measured together: each has the gain of all.
    """
    found: list[MoveRecord] = []
    open_moves: dict[int, int] = {}
    for event in log:
        rank = event.get("rank")
        if not isinstance(rank, int):
            continue
        if event["kind"] == "move_started":
            open_moves[rank] = len(found)
            gain = known(number(event, "predicted_gain_s"))
            reason = str(event.get("reason", ""))
            found.append(MoveRecord(rank, _stage(event.get("to")), reason, event["t"], predicted_gain_s=gain))
        elif event["kind"] == "move_done" and rank in open_moves:
            index = open_moves.pop(rank)
            start = found[index].start
            seconds = number(event, "seconds", event["t"] - start)
            found[index] = msgspec.structs.replace(found[index], end=event["t"], seconds=seconds)
        elif event["kind"] == "move_judged":
            _add_gain(found, event)
    return found


def _add_gain(found: list[MoveRecord], event: Record) -> None:
    """Give the measured gain to the last move of that rank and direction, and to those that started with it."""
    to, rank = _stage(event.get("to")), event.get("rank")
    started = next((move.start for move in reversed(found) if (move.rank, move.to) == (rank, to)), None)
    for index, move in enumerate(found):
        if started is not None and move.to == to and abs(move.start - started) < TOGETHER_S:
            gains = {
                "predicted_gain_s": known(number(event, "predicted_gain_s")),
                "realised_gain_s": known(number(event, "realised_gain_s")),
            }
            found[index] = msgspec.structs.replace(move, **gains)


def _stage(value: object) -> str:
    """``to_train`` and ``train`` both name the training stage."""
    return str(value).removeprefix("to_")


def first_and_last(values: Sequence[float], planned: int = 0) -> tuple[float | None, float | None]:
    """Means of the first and of the last fifth (at least one value each).

    ``planned`` steps of the run: the first fifth is of these, so that a run that trains on does not change it.
    """
    finite = [v for v in values if math.isfinite(v)]
    if not finite:
        return None, None
    share = max(1, round(len(finite) * FIRST_AND_LAST))
    first = max(share, round(planned * FIRST_AND_LAST))
    return mean(finite[:first]), mean(finite[-share:])


class RewardChange(msgspec.Struct, frozen=True):
    """Mean rewards of the first and of the last fifth of some steps; None without any."""

    of: str
    """A task of a mixture, a phase of the task mix; empty: the run."""
    first: float | None
    last: float | None


def reward_changes(rows: Sequence[Record], planned: int = 0) -> list[RewardChange]:
    """One for each task of a mixture, else for each phase, else for the run: no mean is over different work.

    ``planned``: see `first_and_last`.
    """
    names = {key for row in rows for key in row if key.endswith(PART_REWARD) and not key.startswith(EVALUATED)}
    parts = {name.removesuffix(PART_REWARD): column(rows, name) for name in sorted(names)}
    if not parts:
        for row in rows:
            parts.setdefault(phase(row), []).append(number(row, "reward"))
        planned = planned if len(parts) == 1 else 0
    return [RewardChange(of, *first_and_last(values, planned)) for of, values in (parts or {"": []}).items()]


def planned_steps(run: RunDir) -> int:
    """Steps of the run in its last snapshot; 0 without one."""
    planned = run.read_json(run.status).get("steps", 0)
    return planned if isinstance(planned, int) else 0


def drifts(rows: Sequence[Record]) -> list[tuple[Record, str]]:
    """The first step of every further phase, and the phase's name."""
    phases = [phase(row) for row in rows]
    return [(row, now) for row, before, now in zip(rows[1:], phases, phases[1:], strict=False) if now != before]


def duration(seconds: float) -> str:
    """Seconds as ``42 s``, ``3:07`` or ``1:02:03``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    hours, rest = divmod(whole, 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"


def short_duration(seconds: float) -> str:
    """Seconds as one number with its unit: ``42 s``, ``7 min``, ``31 h``, ``5 d``."""
    for unit, name in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if round(seconds) >= 2 * unit:
            return f"{seconds / unit:.0f} {name}"
    return f"{max(seconds, 0.0):.0f} s"
