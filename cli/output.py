"""Output of all verbs: results on stdout (tables or JSON), diagnostics as single lines on stderr."""

from __future__ import annotations

import json
import re
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, JustifyMethod, OverflowMethod, RenderableType
from rich.segment import Segment
from rich.status import Status
from rich.table import Table

from libra_hpc.errors import UserError, invalid

SILENT_S, LONGEST_S = 2.0, 60.0
"""Until the first line in a pipe about work that goes on, and most seconds between two; pauses double."""
WIDTH = 100
"""Columns of tables and panels; a pipe has no width of its own."""
_COMMANDS = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"  # CSI
    r"|(?:\x1b[]PX^_]|[\x90\x98\x9d-\x9f])[^\n\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)?"  # OSC, DCS and other strings
    r"|\x1b[ -/]*[0-~]?"
    r"|[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]"  # C0, C1, direction of text
)
"""What a terminal obeys instead of showing it, but newline and tab."""


KEY = re.compile(r"\w+(?:\.\w+)+=")
"""Begins an override, which other programs take without an option."""


def no_option(word: str) -> UserError:
    """What to say of an override that stands without ``-o``."""
    return invalid("OPTION", word, "a key of the run file is changed with -o", f"-o {word}")


def plain(text: str) -> str:
    """A text without commands to the terminal: logs and reasons of a run hold what models and tools wrote."""
    return _COMMANDS.sub("", text)


class PlainConsole(Console):
    """Shows the texts of tables and panels as `plain` ones; colours are its own."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(plain(segment.text), segment.style)


def print_error(message: str) -> None:
    """Print an error as one line on stderr."""
    print(f"error: {plain(' '.join(message.split()))}", file=sys.stderr)


def print_note(message: str) -> None:
    """Print a line on stderr that is not part of the result."""
    print(plain(message), file=sys.stderr, flush=True)


def print_line(message: str) -> None:
    """Print a plain line of the result."""
    print(plain(message), flush=True)


def show(what: RenderableType) -> None:
    """Print a table or panel: coloured on a terminal, plain in a pipe."""
    console().print(what)


def table(*columns: str, **options: Any) -> Table:
    """A table; ``name>`` is a column at the right, ``name~`` one that may take several lines, ``name>~`` both.

    ``options``: of `rich.table.Table`.
    """
    made = Table(**{"box": box.SIMPLE_HEAD, "pad_edge": False, **options})
    for name in columns:
        marks = name[len(name.rstrip(">~")) :]
        folds: OverflowMethod = "fold" if "~" in marks else "ellipsis"
        justify: JustifyMethod = "right" if ">" in marks else "left"
        made.add_column(name.rstrip(">~"), justify=justify, overflow=folds, no_wrap="~" not in marks)
    return made


def narrow_table(*columns: str, **options: Any) -> Table:
    """Return a `table` with one space between columns."""
    return table(*columns, padding=(0, 1, 0, 0), **options)


def gigabytes(size: float) -> str:
    """Bytes as gigabytes: whole ones from 100 on, below one two digits."""
    return f"{size / 1e9:,.0f}" if size >= 100e9 else f"{size / 1e9:.1f}" if size >= 1e9 else f"{size / 1e9:.2g}"


def picture_file(path: Path | None) -> Path | None:
    """A file that an option names for a picture; raises `UserError` for one that is no SVG."""
    if path is not None and path.suffix != ".svg":
        raise UserError(f"{path}: pictures are SVG files; name it {path.with_suffix('.svg')}.")
    return path


class Lines(threading.Thread):
    """What goes on, as lines on stderr."""

    def __init__(self, what: str) -> None:
        super().__init__(daemon=True)
        self._what, self._began, self._ended = what, time.monotonic(), threading.Event()

    def update(self, what: str) -> None:
        self._what = what

    def run(self) -> None:
        pause = SILENT_S
        while not self._ended.wait(pause):
            print_note(f"{self._what} ({time.monotonic() - self._began:.0f} s)")
            pause = min(2 * pause, LONGEST_S)

    def __enter__(self) -> Lines:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self.join()


def busy(what: str) -> Status | Lines:
    """Context that shows on stderr what goes on: a spinner, `Lines` where that is no terminal."""
    spinner = PlainConsole(stderr=True)
    return spinner.status(what) if spinner.is_terminal else Lines(what)


def console() -> Console:
    """A console for stdout."""
    return PlainConsole(width=None if sys.stdout.isatty() else WIDTH, highlight=False, soft_wrap=False)


def print_json(value: Any) -> None:
    """Print one JSON document; raises for NaN and infinity, which JSON lacks."""
    print(json.dumps(value, indent=1, allow_nan=False), flush=True)
