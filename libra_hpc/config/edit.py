"""Change keys in the text of a run file and keep all else: comments, order, blank lines.

No TOML writer that keeps comments is among the pinned packages, so this edits lines. The result is parsed again: where
it does not parse as it should (inline tables, dotted keys), `edited` returns None.
"""

from __future__ import annotations

import copy
import re
import tomllib
from collections.abc import Mapping
from typing import Any

from .run_file_text import toml_value

HEADER = re.compile(r"^\s*\[([A-Za-z0-9_.-]+)\]\s*(#.*)?$")


def edited(text: str, values: Mapping[str, Any]) -> str | None:
    """``text`` with ``values`` by dotted key; None where its form does not allow that."""
    wanted = tomllib.loads(text)
    lines = text.splitlines()
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        if not _set(wanted, section.split("."), name, copy.deepcopy(value)):
            return None
        _set_line(lines, section, name, toml_value(value))
    made = "\n".join(lines) + "\n"
    try:
        return made if tomllib.loads(made) == wanted else None
    except tomllib.TOMLDecodeError:
        return None


def _set(tables: dict[str, Any], section: list[str], name: str, value: Any) -> bool:
    for part in section:
        tables = tables.setdefault(part, {})
        if not isinstance(tables, dict):
            return False
    tables[name] = value
    return True


def _set_line(lines: list[str], section: str, name: str, value: str) -> None:
    own, place = "", -1
    for number, line in enumerate(lines):
        header = HEADER.match(line)
        if header is not None:
            own = header[1]
        if own != section:
            continue
        if re.match(rf"\s*{re.escape(name)}\s*=", line):
            last, comment = _statement(lines, number)
            lines[number : last + 1] = [f"{name} = {value}" + (f"  {comment}" if comment else "")]
            return
        if header is not None or (line.strip() and not line.lstrip().startswith("#")):
            place = number
    if place < 0:
        lines += [*([""] if lines and lines[-1].strip() else []), f"[{section}]", f"{name} = {value}"]
    else:
        lines.insert(place + 1, f"{name} = {value}")


def _statement(lines: list[str], first: int) -> tuple[int, str]:
    """The last line of the statement that begins at ``first``, and its comment."""
    for last in range(first, len(lines)):
        text = "\n".join(lines[first : last + 1])
        found = _parsed(text)
        if found is None:
            continue
        start = text.rfind("\n") + 1
        for place in (i for i in range(start, len(text)) if text[i] == "#"):
            if _parsed(text[:place]) == found:
                return last, text[place:]
        return last, ""
    return first, ""


def _parsed(text: str) -> dict[str, Any] | None:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return None
