"""How series and durations are drawn and written."""

from __future__ import annotations

import math

import pytest

from libra_hpc.facts import series, summary, view


@pytest.mark.parametrize(
    ("values", "expected"),
    [([], ""), ([1.0], "▄"), ([0.0, 7.0], "▁█"), ([0.0, math.nan, 8.0], "▁█"), ([2.0, 2.0], "▄▄")],
)
def test_sparklines(values: list[float], expected: str) -> None:
    assert view.sparkline(values) == expected


def test_long_series_are_averaged_down() -> None:
    assert len(view.sparkline([float(i) for i in range(1000)], width=24)) == 24


def test_smoothing_is_unbiased_at_the_start_and_passes_over_gaps() -> None:
    assert series.smooth([math.nan, 3.0, math.nan, 3.0])[1:] == pytest.approx([3.0, 3.0, 3.0])


@pytest.mark.parametrize(("seconds", "text"), [(0, "0 s"), (59.4, "59 s"), (187, "3:07"), (3723, "1:02:03")])
def test_durations(seconds: float, text: str) -> None:
    assert summary.duration(seconds) == text
