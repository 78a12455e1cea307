"""Picture of a run: reward, seconds per batch of each stage, and the role of every node, over one time axis.

Vertical lines through all panels mark drift of the task mix, lost engines, and further attempts.  The time in the queue
before an attempt is left out (`RunClock`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator

from libra_hpc.facts import series
from libra_hpc.facts.rundir import RunDir
from libra_hpc.facts.series import drifts
from libra_hpc.facts.starts import starts
from libra_hpc.facts.summary import duration

from .figure_style import AMBER, GREEN, GREY, GRID, RED, ROLLOUT, TRAIN, VIOLET, figure, save, style
from .run_clock import RunClock

COLOURS = {"planner": GREY, "train": TRAIN, "rollout": ROLLOUT, "to_train": AMBER, "to_rollout": AMBER}
DRIFT, KILL, NOTE = VIOLET, RED, "#57606a"


def plot(run: RunDir, out: Path) -> None:
    """Write the picture of a run as PNG, with empty panels if it has no steps.

    Raises `UserError` when the file cannot be written.
    """
    rows, log, _, end = series.read(run)
    rows = [row for row in rows if math.isfinite(series.number(row, "t"))]
    hybrid = run.read_json(run.config).get("planner", {}).get("hybrid_start", "rollout")
    lanes = series.roles(log, end=end, hybrid_start=hybrid)

    clock = RunClock(starts(rows, log))
    drawn = figure(5.4 + 0.28 * max(len(lanes), 2))
    axes: list[Axes] = list(
        drawn.subplots(3, 1, sharex=True, gridspec_kw={"height_ratios": [2.2, 1.6, 0.4 + 0.28 * max(len(lanes), 2)]})
    )
    _reward(axes[0], clock, rows)
    _stages(axes[1], clock, rows)
    _lanes(axes[2], lanes, log, clock)
    _marks(axes, clock=clock, rows=rows, log=log)
    queued = any(begun.queued_s for _, begun in clock.breaks())
    axes[2].set_xlabel("time with nodes (queue left out)" if queued else "time since the job started")
    axes[2].set_xlim(0, max(clock.length, 1.0))
    axes[2].xaxis.set_major_locator(MaxNLocator(10, steps=[1, 1.5, 2, 3, 6, 10]))
    axes[2].xaxis.set_major_formatter(FuncFormatter(lambda seconds, _: duration(seconds)))
    for panel in axes:
        style(panel, run.name if panel is axes[0] else "")
    save(drawn, out)


def _reward(panel: Axes, clock: RunClock, rows: Sequence[series.Record]) -> None:
    times, reward = series.column(rows, "t"), series.column(rows, "reward")
    panel.plot(*clock.line(times, reward), ".", color=GREEN, alpha=0.35, markersize=5, label="step")
    panel.plot(*clock.line(times, series.smooth(reward)), color=GREEN, linewidth=2, label="smoothed")
    panel.set_ylabel("reward")
    panel.grid(axis="y", alpha=GRID)


def _stages(panel: Axes, clock: RunClock, rows: Sequence[series.Record]) -> None:
    times = series.column(rows, "t")
    for key, label in (("train_s", "train"), ("rollout_s", "rollout")):
        line = clock.line(times, series.column(rows, key))
        panel.plot(*line, color=COLOURS[label], linewidth=1.6, label=label)
    waits = clock.line(times, series.column(rows, "wait_s"))
    panel.plot(*waits, color=NOTE, linewidth=1, linestyle=":", label="training waits for rollout")
    panel.set_ylabel("seconds per batch")
    # Without ``wait_s``: the first wait contains the start of the engines and would flatten all other values.
    work = [value for key in ("train_s", "rollout_s") for value in series.column(rows, key) if math.isfinite(value)]
    panel.set_ylim(0, 1.15 * max(work, default=1.0) or 1.0)
    panel.grid(axis="y", alpha=GRID)


def _lanes(panel: Axes, lanes: dict[int, list[series.Interval]], log: Sequence[series.Record], clock: RunClock) -> None:
    for lane, intervals in enumerate(lanes.values()):
        for part in intervals:
            left, right = clock.at(part.start), clock.at(part.end)
            panel.barh(lane, right - left, left=left, height=0.66, color=COLOURS.get(part.role, "#d0d7de"))
    for event in log:
        if event["kind"] == "engine_lost" and event.get("rank") in lanes:
            lane = list(lanes).index(event["rank"])
            panel.plot(clock.at(event["t"]), lane, "X", color=KILL, markeredgecolor="white", markersize=10)
    panel.set_yticks(range(len(lanes)), [f"node {rank}" for rank in lanes])
    panel.set_ylim(len(lanes) - 0.4, -0.6)
    panel.tick_params(axis="y", length=0)
    shown = {"planner": "planner", "train": "train", "rollout": "rollout", "to_train": "moving"}
    handles = [Patch(color=COLOURS[role], label=label) for role, label in shown.items()]
    panel.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.005, 1.0), fontsize=8, frameon=False)


def _marks(
    panels: Sequence[Axes], *, clock: RunClock, rows: Sequence[series.Record], log: Sequence[series.Record]
) -> None:
    found = (
        ("next attempt", NOTE, "-.", [at for at, begun in clock.breaks() if begun.queued_s]),
        ("task mix drifts", DRIFT, "--", [clock.at(row["t"]) for row, _ in drifts(rows)]),
        ("engine lost", KILL, "-", _times(log, "engine_lost", clock)),
    )
    top = panels[0]
    for label, colour, dashes, times in found:
        for panel in panels:
            for at in times:
                panel.axvline(at, color=colour, linewidth=1.2, linestyle=dashes, zorder=0)
        if times:
            top.plot([], [], color=colour, linewidth=1.2, linestyle=dashes, label=label)
    if saved := _times(log, "checkpoint_saved", clock):
        heights, place = [0.02] * len(saved), top.get_xaxis_transform()
        top.plot(saved, heights, "^", color=NOTE, markersize=5, transform=place, label="checkpoint", clip_on=False)
    for panel in panels[:2]:
        panel.legend(loc="upper left", bbox_to_anchor=(1.005, 1.0), fontsize=8, frameon=False)


def _times(log: Sequence[series.Record], kind: str, clock: RunClock) -> list[float]:
    return [clock.at(event["t"]) for event in log if event["kind"] == kind]
