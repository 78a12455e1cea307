"""Charts as SVG: lines, points, vertical marks and axes, in a page or as a picture of their own.

Their style sheet is `chart.css`: the colours follow the reader's light or dark scheme, and the text stays text.  A
chart of ten thousand steps has 30 kB.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import jinja2
from markupsafe import Markup, escape

from libra_hpc.facts.series import duration
from libra_hpc.files import write_result

WIDTH, HEIGHT = 560, 240
"""Size of a chart in a page."""
PICTURE_WIDTH = 840
"""Width of a picture: that of a README."""
LETTER = 6.5
"""Room for a letter of a legend."""
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 10, 40
"""Margins of the plot, for the tick labels."""
MOST_POINTS = 500
"""Most points of a line: about one for each pixel of the plot."""
Point = tuple[float, float]
VALUE = itemgetter(1)
"""y of a point."""
TICKS = 6
"""Most ticks of an axis, less one."""
CLOCK = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400)
"""Seconds between two ticks of a time axis."""


class Line(NamedTuple):
    """One series; a NaN in ``ys`` interrupts it."""

    name: str
    style: str
    """Class of the style sheet: ``reward`` | ``train`` | ``rollout`` | ``moving`` | ``note`` | ``c0`` .. ``c6``"""
    xs: Sequence[float]
    ys: Sequence[float]
    shape: str = "line"
    """``line`` | ``points`` | ``dashed`` | ``broken`` | ``dotted`` | ``area``: filled down to 0 | ``band``: filled"""


class Mark(NamedTuple):
    """A vertical line."""

    x: float
    """NaN: it is not drawn."""
    style: str
    name: str
    """Equal names share an entry of the legend."""
    text: str
    """What happened, shown under the pointer."""


class Chart(NamedTuple):
    title: str
    described: str
    """The chart in a sentence, for who does not see it."""
    x_label: str
    y_label: str
    lines: Sequence[Line]
    marks: Sequence[Mark] = ()
    clock: bool = False
    """Whether the x axis has seconds from 0, labelled as times."""
    whole: bool = False
    """Whether only whole numbers mean something on the y axis."""
    zero: bool = True
    """Whether the y axis begins at 0."""
    top: float | None = None
    """Upper end of the y axis; None: the largest value."""
    end: float | None = None
    """Upper end of the x axis; None: the largest value."""


class _Scale(NamedTuple):
    low: float
    high: float
    start: float
    end: float

    def at(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


def svg(chart: Chart, width: int = WIDTH, height: int = HEIGHT) -> Markup:
    """The chart as an ``<svg>`` element."""
    x, y = _scales(chart, width, height)
    parts = [
        Markup('<svg viewBox="0 0 {0} {1}" width="{0}" height="{1}" role="img" aria-label="{2}">').format(
            width, height, chart.described
        ),
        *_axes(chart, x, y),
        # A nested element clips what is outside the plot.
        Markup('<svg x="{0}" y="{1}" width="{2}" height="{3}" viewBox="{0} {1} {2} {3}">').format(
            LEFT, TOP, width - LEFT - RIGHT, height - TOP - BOTTOM
        ),
        *(path for line in chart.lines for path in _line(line, x, y)),
        *(_mark(mark, x, y) for mark in chart.marks if math.isfinite(mark.x)),
        Markup("</svg></svg>"),
    ]
    return Markup("\n").join(parts)


def legend(charts: Sequence[Chart]) -> list[tuple[str, str, str]]:
    """Name, style and shape of every line, then of every kind of mark; of lines with one name, that of the last."""
    lines = {(line.name, line.style): line.shape for chart in charts for line in chart.lines}
    marks = {(mark.name, mark.style): "mark" for chart in charts for mark in chart.marks if math.isfinite(mark.x)}
    return [(*key, shape) for key, shape in (lines | marks).items()]


def template(name: str, **options: Any) -> jinja2.Template:
    """A template of this package, which escapes every text."""
    return jinja2.Environment(
        loader=jinja2.PackageLoader("libra_hpc", "pictures"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        **options,
    ).get_template(name)


def draw(charts: Sequence[Chart], title: str, out: Path) -> None:
    """Write charts below each other as an SVG file with one legend; raises `UserError` when it cannot be written."""
    entries = legend(charts)
    entry_width = 50 + math.ceil(LETTER * max((len(name) for name, _, _ in entries), default=0))
    text = template("picture.svg.j2").render(
        title=title,
        charts=charts,
        svg=svg,
        legend=entries,
        entry_width=entry_width,
        across=max(1, PICTURE_WIDTH // entry_width),
        width=PICTURE_WIDTH,
        chart_height=120 + 220 // max(1, len(charts)),
    )
    write_result(out, text.encode())


def stair(changes: Iterable[tuple[float, float]]) -> tuple[list[float], list[float]]:
    """The running sum of changes in order of x; changes at one x are one."""
    xs: list[float] = []
    ys: list[float] = []
    count = 0.0
    for x, group in groupby(changes, key=lambda change: change[0]):
        xs += [x] * 2
        ys.append(count)
        count += sum(by for _, by in group)
        ys.append(count)
    return xs, ys


def parts_of(xs: Sequence[float], ys: Sequence[float]) -> list[list[Point]]:
    """The uninterrupted parts of a line."""
    parts: list[list[Point]] = [[]]
    for x, y in zip(xs, ys, strict=True):
        if math.isfinite(x) and math.isfinite(y):
            parts[-1].append((x, y))
        elif parts[-1]:
            parts.append([])
    return [part for part in parts if part]


def stretches(part: Sequence[Point], length: int) -> list[Sequence[Point]]:
    """``part`` in pieces of ``length`` points."""
    return [part[first : first + length] for first in range(0, len(part), length)]


def extremes(part: Sequence[Point], length: int) -> list[Point]:
    """The ends of a part, and of each stretch its lowest and its highest point."""
    if length <= 2:
        return list(part)
    found = {part[0], part[-1]}
    for piece in stretches(part, length):
        found |= {min(piece, key=VALUE), max(piece, key=VALUE)}
    return sorted(found)


def means(part: Sequence[Point], length: int) -> list[Point]:
    """Return the mean of each stretch of ``length`` points."""
    return [(fmean(x for x, _ in piece), fmean(y for _, y in piece)) for piece in stretches(part, length)]


def ticks(low: float, high: float, *, whole: bool = False) -> list[float]:
    """Round numbers between ``low`` and ``high``."""
    rough = (high - low) / TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    return _multiples(low, high, max(step, 1.0) if whole else step)


def clock_ticks(high: float) -> list[float]:
    """Round times between 0 and ``high`` seconds."""
    step = next((step for step in CLOCK if step * (TICKS + 1) >= high), 0)
    days = math.ceil(high / TICKS / CLOCK[-1])
    return _multiples(0.0, high, step or days * CLOCK[-1])


def short_number(value: float) -> str:
    """A tick of a value axis: ``0.5``, ``20``, ``1.5k``, ``3M``."""
    for unit, name in ((1e6, "M"), (1e3, "k")):
        if abs(value) >= unit:
            return f"{value / unit:.10g}{name}"
    return f"{value:.10g}"


def _multiples(low: float, high: float, step: float) -> list[float]:
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(index * step, 10) for index in range(first, last + 1)]


def _scales(chart: Chart, width: int, height: int) -> tuple[_Scale, _Scale]:
    xs = [x for line in chart.lines for x, y in zip(line.xs, line.ys, strict=True) if math.isfinite(y)]
    ys = [y for line in chart.lines for y in line.ys if math.isfinite(y)]
    low = 0.0 if chart.clock else min(xs, default=0.0)
    high = max(xs, default=1.0) if chart.end is None else chart.end
    bottom = 0.0 if chart.zero else min(ys, default=0.0)
    top = max(ys, default=1.0) if chart.top is None else chart.top
    room = 0.05 * (top - bottom)
    bottom, top = (bottom if chart.zero else bottom - room), top + room
    return (
        _Scale(low, high if high > low else low + 1.0, LEFT + 4, width - RIGHT - 4),
        _Scale(bottom, top if top > bottom else bottom + 1.0, height - BOTTOM, TOP),
    )


def _axes(chart: Chart, x: _Scale, y: _Scale) -> Iterator[Markup]:
    floor, right = y.start, x.end + 4
    for value in ticks(y.low, y.high, whole=chart.whole):
        at = y.at(value)
        yield Markup('<line class="grid" x1="{}" x2="{}" y1="{:.1f}" y2="{:.1f}"/>').format(LEFT, right, at, at)
        yield Markup('<text class="y" x="{}" y="{:.1f}">{}</text>').format(LEFT - 6, at + 4, short_number(value))
    for value in clock_ticks(x.high) if chart.clock else ticks(x.low, x.high, whole=True):
        text = duration(value) if chart.clock else f"{value:,.10g}"
        yield Markup('<text class="x" x="{:.1f}" y="{}">{}</text>').format(x.at(value), floor + 15, text)
    yield Markup('<line class="axis" x1="{}" x2="{}" y1="{}" y2="{}"/>').format(LEFT, right, floor, floor)
    yield Markup('<text class="name" x="{}" y="{}">{}</text>').format(right, floor + BOTTOM - 5, chart.x_label)
    yield Markup('<text class="side" transform="translate(11 {}) rotate(-90)">{}</text>').format(TOP, chart.y_label)


def _line(line: Line, x: _Scale, y: _Scale) -> Iterator[Markup]:
    """A long line as means over stretches, before a band from the least to the greatest value of each."""
    parts = [[(x.at(a), y.at(b)) for a, b in part] for part in parts_of(line.xs, line.ys)]
    length = math.ceil(sum(map(len, parts)) / MOST_POINTS)
    if line.shape == "points":
        drawn = "".join(f"M{a:.1f} {b:.1f}h0" for part in parts for a, b in extremes(part, 2 * length))
    elif line.shape == "area":
        drawn = "".join(_area(part, [(part[-1][0], y.at(0.0)), (part[0][0], y.at(0.0))]) for part in parts)
    elif line.shape == "band":
        drawn = "".join(_area(part, ()) for part in parts)
    else:
        if length > 1 and line.shape == "line":
            yield _path("band", line.style, "".join(_band(part, length) for part in parts))
        # A part of one point is a dot: the line's round end.
        drawn = "".join(f"M{_joined(means(part, length))}{'h0' if len(part) <= length else ''}" for part in parts)
    yield _path(line.shape, line.style, drawn)


def _band(part: Sequence[Point], length: int) -> str:
    pieces = stretches(part, length)
    low, high = ([(piece[0][0], choose(map(VALUE, piece))) for piece in pieces] for choose in (min, max))
    return _area(low, high[::-1])


def _area(there: Sequence[Point], back: Sequence[Point]) -> str:
    return f"M{_joined([*there, *back])}z"


def _joined(points: Sequence[Point]) -> str:
    return " ".join(f"{a:.1f} {b:.1f}" for a, b in points)


def _path(shape: str, style: str, drawn: str) -> Markup:
    return Markup('<path class="{} {}" d="{}"/>').format(shape, style, drawn)


def _mark(mark: Mark, x: _Scale, y: _Scale) -> Markup:
    return Markup('<line class="mark {}" x1="{:.1f}" x2="{:.1f}" y1="{}" y2="{}"><title>{}</title></line>').format(
        mark.style, x.at(mark.x), x.at(mark.x), y.end, y.start, escape(mark.text)
    )
