"""Picture of several runs: one metric over steps, and beside it over wall time.

- A run -> a smoothed line and the steps as dots.
- Runs that differ in nothing but the seed -> the median of their smoothed lines, and a band from lowest to highest.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from libra_hpc.facts.comparison import MetricCurve
from libra_hpc.facts.series import smooth
from libra_hpc.facts.summary import duration

from .figure_style import GRID, figure, save, style

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""Palette of Okabe and Ito, distinct for colour-blind readers; their yellow is too pale on white."""
DASHES = ("-", "--", ":")
"""The next line has the next colour and the next dashes: of two equal lines, both are seen."""
MOST_LINES = len(COLOURS) * len(DASHES)
"""More lines could not be told apart: the numbers of colours and of dashes have no common divisor."""
LEGEND_CHARS = 110
"""Characters of a row of the legend under a picture of the common width, less the samples of the lines."""


class MetricLine(NamedTuple):
    """Curves that are drawn as one line."""

    label: str
    curves: list[MetricCurve]


class MedianPoint(NamedTuple):
    """A step of a line; of one curve, all three values are equal."""

    step: int
    wall_s: float
    low: float
    middle: float
    high: float


def draw(lines: Sequence[MetricLine], metric: str, title: str, out: Path) -> None:
    """Write the picture as PNG; raises `UserError` when the file cannot be written.

    Every line needs a step; of more than `MOST_LINES` the first are drawn.
    """
    shown = lines[:MOST_LINES]
    columns = max(1, min(4, LEGEND_CHARS // (6 + max(len(line.label) for line in shown))))
    drawn = figure(3.6 + 0.22 * math.ceil(len(shown) / columns))
    panels: list[Axes] = list(drawn.subplots(1, 2, sharey=True))
    for number, line in enumerate(shown):
        colour, dashes = COLOURS[number % len(COLOURS)], DASHES[number % len(DASHES)]
        points = median_line(line.curves)
        for panel, at in (
            (panels[0], [float(point.step) for point in points]),
            (panels[1], [point.wall_s for point in points]),
        ):
            middle = [point.middle for point in points]
            panel.plot(at, middle, color=colour, linestyle=dashes, linewidth=1.8, label=line.label)
            if len(line.curves) > 1:
                low, high = [point.low for point in points], [point.high for point in points]
                panel.fill_between(at, low, high, color=colour, alpha=0.18, linewidth=0)
        if len(line.curves) == 1:
            (curve,) = line.curves
            for panel, all_at in ((panels[0], curve.steps), (panels[1], curve.wall_s)):
                panel.plot(all_at, curve.values, ".", color=colour, alpha=0.3, markersize=4)
    panels[0].set_ylabel(metric)
    panels[0].set_xlabel("step")
    panels[0].xaxis.set_major_locator(MaxNLocator(8, integer=True))
    panels[1].set_xlabel("time since the job started")
    panels[1].xaxis.set_major_locator(MaxNLocator(8, steps=[1, 1.5, 2, 3, 6, 10]))
    panels[1].xaxis.set_major_formatter(FuncFormatter(lambda seconds, _: duration(seconds)))
    for panel in panels:
        style(panel, title if panel is panels[0] else "")
        panel.set_xlim(left=0)
        panel.grid(axis="y", alpha=GRID)
    handles, labels = panels[0].get_legend_handles_labels()
    drawn.legend(handles, labels, loc="outside lower left", ncols=columns, fontsize=8, frameon=False)
    save(drawn, out)


def median_line(curves: Sequence[MetricCurve]) -> list[MedianPoint]:
    """Median, lowest and highest smoothed value of every step that at least half of the curves have.

    A step's time is the median of its times, so a slow seed does not shift the others.
    """
    by_step: dict[int, list[tuple[float, float]]] = {}
    for curve in curves:
        for step, wall_s, value in zip(curve.steps, curve.wall_s, smooth(curve.values), strict=True):
            by_step.setdefault(step, []).append((wall_s, value))
    points = []
    for step, found in sorted(by_step.items()):
        if 2 * len(found) >= len(curves):
            values = [value for _, value in found]
            wall_s = statistics.median(at for at, _ in found)
            points.append(MedianPoint(step, wall_s, min(values), statistics.median(values), max(values)))
    return points
