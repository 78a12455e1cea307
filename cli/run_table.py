"""Tables with a row for every run, which leave columns out for a narrow terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from .output import console, show, table

MISSING = ("", "-")
"""Texts of empty cells; a column of them is left out."""


class RunRow(NamedTuple):
    """One run; rows of one sweep stand together."""

    sweep: str
    cells: Mapping[str, str | Text]
    """Texts by name of a column."""


def show_runs(rows: Sequence[RunRow], columns: Sequence[str], dispensable: Sequence[str] = ()) -> None:
    """Show a table, runs without a sweep first; ``columns`` as in `output.table`.

    The terminal is too narrow -> the columns in ``dispensable`` are left out, one after the other.
    """
    rows = sorted(rows, key=lambda row: row.sweep)
    shown = [name for name in columns if any(str(row.cells[name.rstrip(">")]) not in MISSING for row in rows)]
    for less in range(len(dispensable) + 1):
        made = _table(rows, [name for name in shown if name.rstrip(">") not in dispensable[:less]])
        wide = console().options.update(max_width=1000)
        if Measurement.get(console(), wide, made).maximum <= console().width:
            break
    show(made)


def _table(rows: Sequence[RunRow], columns: Sequence[str]) -> Table:
    made = table(*columns)
    for sweep, group in groupby(rows, key=lambda row: row.sweep):
        if sweep:
            made.add_section()
            made.add_row(Text(f"sweep {sweep}", style="bold"))
        for row in group:
            made.add_row(*(row.cells[name.rstrip(">")] for name in columns))
    return made
