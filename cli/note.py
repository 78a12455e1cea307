"""`libra-hpc note`: write a note or tags to a run, for `list` and `status`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from libra_hpc.config.job import NAME
from libra_hpc.errors import invalid

from . import register
from .output import plain, print_json, print_line
from .register import RegisterLine
from .runs import RUNS, JsonOption, RunsOption, find_run, run_names

NOTE_LENGTH = 500
"""Characters: with its path a line stays below the 4 KiB that file systems append at once."""
TAG_LENGTH = 32


def note(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="Run folder, its name, or its job id.", autocompletion=run_names)
    ],
    text: Annotated[str | None, typer.Argument(metavar="TEXT", help="The note; default: show what there is.")] = None,
    tag: Annotated[list[str], typer.Option("--tag", metavar="TAG", help="Add a tag; repeatable.")] = [],  # noqa: B006
    untag: Annotated[list[str], typer.Option("--untag", metavar="TAG", help="Remove a tag; repeatable.")] = [],  # noqa: B006
    json: JsonOption = False,
    runs: RunsOption = Path(RUNS),
) -> None:
    found = find_run(run, runs)
    path = str(register.real(found))
    facts = [] if text is None else [RegisterLine(path, "note", checked_text(text))]
    facts += [RegisterLine(path, "untag", checked_tag("--untag", one)) for one in untag]
    facts += [RegisterLine(path, "tag", checked_tag("--tag", one)) for one in tag]
    if facts:
        register.add(facts)
    known = register.of_run(found)
    if json:
        print_json({"run": found.name, "path": str(found.path), **msgspec.to_builtins(known)})
        return
    print_line(f"{found.name}: {known.words or 'no note and no tag'}")


def checked_text(text: str) -> str:
    """A note as one line; raises `UserError` for one that is empty or too long."""
    line = " ".join(plain(text).split())
    if not 0 < len(line) <= NOTE_LENGTH:
        raise invalid("TEXT", text[:40], f"it has {len(line)} characters", f"1 to {NOTE_LENGTH}")
    return line


def checked_tag(option: str, tag: str) -> str:
    """``tag``; raises `UserError` for one that no shell and no screen takes as a word."""
    if not re.fullmatch(NAME, tag) or len(tag) > TAG_LENGTH:
        raise invalid(
            option, tag, "malformed", f"at most {TAG_LENGTH} letters, digits and . _ - , a letter or digit first"
        )
    return tag
