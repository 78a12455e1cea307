"""The charts of a run: reward, stages and nodes over time; reward, staleness, lengths and new weights over steps.

The time axis is seconds with nodes, so that hours in the queue between attempts take no room. A restart inside a job
keeps its nodes and therefore its room. No line crosses a start.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from libra_hpc.facts import series
from libra_hpc.facts.events import in_words
from libra_hpc.facts.layout_log import replay, stage
from libra_hpc.facts.rundir import RunDir
from libra_hpc.facts.series import drifts, duration, first_and_last
from libra_hpc.facts.starts import RunStart, job_seconds, starts

from .svg_chart import Chart, Line, Mark, draw, stair


class RunClock:
    """Epoch seconds -> seconds on the axis."""

    def __init__(self, starts: Sequence[RunStart]) -> None:
        self._starts = starts
        self._begins = [start.start for start in starts]
        self._queued: list[float] = []
        """Seconds in the queue up to each start."""
        for start in starts:
            self._queued.append((self._queued[-1] if self._queued else 0.0) + start.queued_s)
        self.length = job_seconds(starts)

    def at(self, t: float) -> float:
        """Place of a time on the axis; a time in the queue is at the end of the attempt before."""
        index = self.start_of(t)
        if index < 0:
            return 0.0
        following = self._starts[index + 1 : index + 2]
        if following and following[0].queued_s:
            t = min(t, self._starts[index].end)
        return min(t - self._begins[0] - self._queued[index], self.length)

    def start_of(self, t: float) -> int:
        """Index of the start that a time belongs to; -1 before the first."""
        return bisect_right(self._begins, t) - 1

    def line(self, times: Sequence[float], values: Sequence[float]) -> tuple[list[float], list[float]]:
        """Points of a line, with a NaN between the steps of two starts."""
        xs: list[float] = []
        ys: list[float] = []
        before: int | None = None
        for t, value in zip(times, values, strict=True):
            index = self.start_of(t)
            if before is not None and index != before:
                xs.append(self.at(t))
                ys.append(math.nan)
            xs.append(self.at(t))
            ys.append(value)
            before = index
        return xs, ys


Rows = Sequence[series.Record]
Stages = Sequence[tuple[float, Counter[str]]]
STAGES = ("train", "moving", "rollout")
CLOCK_LABEL = "time with nodes"
"""The queue is left out."""


def draw_run(run: RunDir, out: Path) -> None:
    """Write the picture of a run; raises `UserError` when it cannot be written."""
    recorded = series.read(run)
    rows, log, *_ = recorded
    draw(over_time(rows, log, starts=starts(rows, log), stages=node_stages(run, recorded)), run.name, out)


def charts(rows: Rows, log: Rows, *, starts: Sequence[RunStart], eta: int | None, stages: Stages) -> list[Chart]:
    """The charts of a run with steps; without one of the metrics its chart is left out.

    ``eta``: the staleness bound; ``stages``: see `node_stages`.
    """
    ends, steps = series.column(rows, "t"), series.column(rows, "step")
    marks = _marks(
        rows, log, starts, lambda t: next((step for step, end in zip(steps, ends, strict=True) if end >= t), math.nan)
    )
    drawn = [
        _reward("Reward over steps", rows, marks, None),
        *over_time(rows, log, starts=starts, stages=stages),
        _staleness(rows, marks, eta),
        _lengths(rows, marks),
        _updates(rows, marks),
    ]
    return [chart for chart in drawn if any(math.isfinite(y) for line in chart.lines for y in line.ys)]


def over_time(rows: Rows, log: Rows, *, starts: Sequence[RunStart], stages: Stages) -> list[Chart]:
    """Reward, stages and nodes over one time axis."""
    clock = RunClock(starts)
    marks = _marks(rows, log, starts, clock.at)
    return [
        _reward("Reward over time", rows, marks, clock),
        _stages(rows, marks, clock),
        _nodes(stages, starts, clock, marks),
    ]


def change(name: str, values: Sequence[float], digits: int = 2) -> str:
    """First and last value of a series in words: means over a fifth of the steps."""
    first, last = first_and_last(values)
    return f"{name} is not recorded" if first is None else f"{name} from {first:.{digits}f} to {last:.{digits}f}"


def _reward(title: str, rows: Rows, marks: Sequence[Mark], clock: RunClock | None) -> Chart:
    reward, steps = series.column(rows, "reward"), series.column(rows, "step")

    def placed(values: Sequence[float]) -> tuple[Sequence[float], Sequence[float]]:
        return (steps, values) if clock is None else clock.line(series.column(rows, "t"), values)

    return Chart(
        title=title,
        described=f"{change('Reward', reward, 3)}, over {len(rows)} steps.",
        x_label="step" if clock is None else CLOCK_LABEL,
        y_label="reward",
        lines=[
            Line("each step", "reward", *placed(reward), shape="points"),
            Line("smoothed", "reward", *placed(series.smooth(reward))),
        ],
        marks=marks,
        clock=clock is not None,
        zero=min((value for value in reward if math.isfinite(value)), default=0.0) >= 0.0,
        end=None if clock is None else clock.length,
    )


def _stages(rows: Rows, marks: Sequence[Mark], clock: RunClock) -> Chart:
    times, train, rollout, waits = (series.column(rows, key) for key in ("t", "train_s", "rollout_s", "wait_s"))
    return Chart(
        title="Seconds per batch of each stage",
        described=f"Per batch, in seconds: {change('training', train)}; {change('rollout', rollout)}.",
        x_label=CLOCK_LABEL,
        y_label="seconds",
        lines=[
            Line("training waits for rollout", "note", *clock.line(times, waits), shape="dashed"),
            Line("train", "train", *clock.line(times, train)),
            Line("rollout", "rollout", *clock.line(times, rollout)),
        ],
        marks=marks,
        clock=True,
        # The first wait contains the start of the engines and would flatten all other values.
        top=max((value for value in train + rollout if math.isfinite(value)), default=None),
        end=clock.length,
    )


def node_stages(run: RunDir, recorded: series.Recorded) -> Stages:
    """(epoch seconds, nodes of each stage) of every Layout of a run."""
    return [(recorded.since(one.t), Counter(map(stage, one.layout.rows.values()))) for one in replay(run)]


def _nodes(stages: Stages, starts: Sequence[RunStart], clock: RunClock, marks: Sequence[Mark]) -> Chart:
    """Areas on top of each other: training below, moving nodes on it, rollout on both."""
    changes: list[tuple[float, int, int]] = []
    within = [(min(t, starts[clock.start_of(t)].end), counts) for t, counts in stages]
    before = Counter[str]()
    for t, counts in sorted([*within, *((start.end, Counter[str]()) for start in starts)], key=lambda one: one[0]):
        changed = [(number, counts[name] - before[name]) for number, name in enumerate(STAGES)]
        changes += [(clock.at(t), number, by) for number, by in changed if by]
        before = counts
    lines = []
    for number, name in enumerate(STAGES):
        xs, ys = stair((t, by) for t, other, by in changes if other <= number)
        if any(other == number for _, other, _ in changes):
            lines.append(Line(name, name, xs, ys, shape="area"))
    # What is drawn first is covered by the next.
    return Chart(
        title="Nodes of each stage",
        described=f"Nodes by stage, {max((max(line.ys) for line in lines), default=0):.0f} at most.",
        x_label=CLOCK_LABEL,
        y_label="nodes",
        lines=lines[::-1],
        marks=marks,
        clock=True,
        whole=True,
        end=clock.length,
    )


def _staleness(rows: Rows, marks: Sequence[Mark], eta: int | None) -> Chart:
    steps, mean, most = (series.column(rows, key) for key in ("step", "staleness_mean", "staleness_max"))
    bound = [] if eta is None else [Line("bound (eta)", "note", steps[:1] + steps[-1:], [float(eta)] * 2, "dashed")]
    if not any(map(math.isfinite, mean)):
        bound = []
    return Chart(
        title="Staleness of the trained samples",
        described=f"Weight versions between first sampling and training: {change('mean', mean)}.",
        x_label="step",
        y_label="weight versions",
        lines=[Line("mean", "rollout", steps, mean), Line("maximum", "moving", steps, most), *bound],
        marks=marks,
    )


def _lengths(rows: Rows, marks: Sequence[Mark]) -> Chart:
    steps, middle, long = (series.column(rows, key) for key in ("step", "gen_tokens_p50", "gen_tokens_p95"))
    return Chart(
        title="Generated tokens of a trajectory",
        described=f"Generated tokens: {change('median', middle, 0)}; {change('95th percentile', long, 0)}.",
        x_label="step",
        y_label="tokens",
        lines=[Line("median", "rollout", steps, middle), Line("95th percentile", "moving", steps, long)],
        marks=marks,
    )


def _updates(rows: Rows, marks: Sequence[Mark]) -> Chart:
    names = ("changed_share", "weights_mb", "weights_dense_mb", "pause_s")
    changed, size, dense, pause = (series.mean(series.column(rows, name)) for name in names)
    parts = (
        ("until engines have them", "update_s", "rollout"),
        ("diff", "diff_s", "train"),
        ("wire", "wire_s", "note"),
    )
    steps = series.column(rows, "step")
    return Chart(
        title="New weights",
        described=f"Of a version, mean: {changed:.1%} changed, {size:,.1f} of {dense:,.1f} MB, pause {pause:.3f} s.",
        x_label="step",
        y_label="seconds",
        lines=[Line(name, color, steps, series.column(rows, key)) for name, key, color in parts]
        + [Line("stage", "moving", steps, series.column(rows, "stage_s"))],
        marks=marks,
    )


def _marks(rows: Rows, log: Rows, starts: Sequence[RunStart], at: Callable[[float], float]) -> list[Mark]:
    """What happened to the run; ``at``: epoch seconds -> place on the x axis."""
    marks = [_start_mark(at(start.start), start) for start in starts[1:]]
    for row, name in drifts(rows):
        marks.append(Mark(at(series.number(row, "t")), "drift", "task mix drifts", f"from here on: {name}"))
    for move in series.moves(log):
        marks.append(Mark(at(move.start), "move", "node moves", f"node {move.rank} moves to {move.to}"))
    for event in log:
        if event["kind"] in ("engine_lost", "node_lost"):
            text = f"{in_words(event['kind'])}, node {event.get('rank', '?')}: {event.get('reason', '')}"
            marks.append(Mark(at(event["t"]), "lost", "engine or node lost", text.removesuffix(": ")))
    return marks


def _start_mark(at: float, start: RunStart) -> Mark:
    if not start.queued_s:
        return Mark(at, "start", "restart inside the job", f"attempt {start.attempt}")
    waited = f"attempt {start.attempt}, {duration(start.queued_s)} after the one before"
    return Mark(at, "queued", "next attempt, after the queue", waited)
