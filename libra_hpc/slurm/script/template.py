"""A site's own template of the batch script (``slurm.template``), checked against the built-in one.

- It gets the values that `sbatch/run.sbatch.j2` gets, and may add lines, options and words anywhere.
- A line or word of the built-in script is missing or in another order -> an error that quotes it.
- ``--mpi``, ``--mem`` and ``--cpu-bind`` of the step may be left out or changed.
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2

from libra_hpc.errors import error_text, invalid

DIRECTIVE = "#SBATCH "
FREE = re.compile(r"--(mpi|mem|cpu-bind)=")


def script_text(site: str, **values: Any) -> str:
    """The batch script, from the template at ``site``; empty: from the built-in one.

    Raises `UserError` where the site's script lacks what the built-in one has.
    """
    built_in = _rendered(resources.files("libra_hpc_sbatch").joinpath("run.sbatch.j2").read_text(), values)
    if not site:
        return built_in
    try:
        text = _rendered(Path(site).read_text(), values)
        why = _fault(built_in, text)
    except (OSError, ValueError) as error:
        why = f"it cannot be read ({error_text(error)})"
    except jinja2.TemplateError as error:
        line = f"line {error.lineno}: " if isinstance(error, jinja2.TemplateSyntaxError) else ""
        why = f"{line}{error}".rstrip(".")
    if why:
        raise invalid("slurm.template", site, why, "a copy of sbatch/run.sbatch.j2 with further lines")
    return text


def _rendered(template: str, values: Mapping[str, Any]) -> str:
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    return environment.from_string(template).render(values)


def _fault(built_in: str, text: str) -> str:
    """Why ``text`` cannot stand for the built-in script; empty: it can."""
    for what, parts in (("line", _directives), ("line", _commands), ("word", _last_words)):
        if missing := _first_missing(parts(built_in), parts(text)):
            return f"its script lacks the {what} {missing!r}, or has it in another order"
    own = _directives(built_in)
    names = {line.partition("=")[0] for line in (*own, f"{DIRECTIVE}hetjob")}
    for line in (Counter(_directives(text)) - Counter(own)).elements():
        if line.partition("=")[0] in names:
            return f"its line {line!r} changes what libra-hpc sets itself"
    commands = text[text.index(next(_logical(text))) :]
    late = next(iter(_directives(commands)), "")
    return f"sbatch does not read its line {late!r}, which stands behind a command" if late else ""


def _directives(text: str) -> list[str]:
    return [line.rstrip() for line in text.splitlines() if line.startswith(DIRECTIVE)]


def _commands(text: str) -> list[str]:
    """Lines that bash executes, less the last command."""
    return [line.strip() for line in _logical(text)][:-1]


def _last_words(text: str) -> list[str]:
    """Words of the last command, which starts the ranks."""
    return [word for word in shlex.split([*_logical(text)][-1]) if not FREE.match(word)]


def _logical(text: str) -> Iterator[str]:
    joined = text.replace("\\\n", " ")
    return (line for line in joined.splitlines() if line.strip() and not line.startswith("#"))


def _first_missing(wanted: Iterable[str], found: Iterable[str]) -> str:
    """The first of ``wanted`` that does not come in ``found`` behind the one before it."""
    rest = iter(found)
    return next((one for one in wanted if one not in rest), "")
