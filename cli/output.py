"""Output of all verbs: results on stdout (tables or JSON), diagnostics as single lines on stderr."""

from __future__ import annotations

import json
import sys
from typing import Any

from rich import box
from rich.console import Console, JustifyMethod, OverflowMethod, RenderableType
from rich.status import Status
from rich.table import Table

WIDTH = 100
"""Columns of tables and panels; a pipe has no width of its own."""


def print_error(message: str) -> None:
    """Print an error as one line on stderr."""
    print(f"error: {' '.join(message.split())}", file=sys.stderr)


def print_note(message: str) -> None:
    """Print a line on stderr that is not part of the result."""
    print(message, file=sys.stderr, flush=True)


def print_line(message: str) -> None:
    """Print a plain line of the result."""
    print(message, flush=True)


def show(what: RenderableType) -> None:
    """Print a table or panel: coloured on a terminal, plain in a pipe."""
    console().print(what)


def table(*columns: str, **options: Any) -> Table:
    """A table; ``name>`` is a column at the right, ``name~`` one that may take several lines, ``name>~`` both."""
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, **options)
    for name in columns:
        marks = name[len(name.rstrip(">~")) :]
        folds: OverflowMethod = "fold" if "~" in marks else "ellipsis"
        justify: JustifyMethod = "right" if ">" in marks else "left"
        made.add_column(name.rstrip(">~"), justify=justify, overflow=folds, no_wrap="~" not in marks)
    return made


def busy(what: str) -> Status:
    """Context with a spinner on stderr; shows nothing where stderr is no terminal."""
    return Console(stderr=True).status(what)


def console() -> Console:
    """A console for stdout."""
    return Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False, soft_wrap=False)


def print_json(value: Any) -> None:
    """Print one JSON document; raises for NaN and infinity, which JSON lacks."""
    print(json.dumps(value, indent=1, allow_nan=False), flush=True)
