"""A configuration as a run file, and changes to the text of one.

It has every key that differs from its default, and those of the site profile.  So it loads to the same configuration
with and without that profile.
"""

from __future__ import annotations

import copy
import json
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from .load import flat
from .run import RunConfig

TABLES = ("compute.env", "task.options")
"""Keys whose values are tables of any names."""
HIDDEN = "(hidden)"
"""Stands for a value that may be a secret, in what is for others."""
_SECRET = r"(?i:keys?|token|secrets?|passwords?|passwd|passphrase|credentials?)(?![a-z])"
"""In a name; ``max_tokens`` is no secret."""
_HIDDEN_TABLES = re.compile(r"(compute\.env|task(\.\w+)?\.options)\b")
"""Keys of `TABLES`, and those of one of several tasks."""
_ASSIGNED = re.compile(rf"""((?:\bexport\s+\w+|{_SECRET}\w*)=)("[^"]*"|'[^']*'|\S+)""")
"""In a line of a shell, or an option."""
_BARE = re.compile(r"[A-Za-z0-9_-]+")


def values(config: RunConfig) -> dict[str, Any]:
    """Dotted keys and values, in the order of the schema."""
    return flat(config.as_data(), TABLES)


DEFAULTS = values(RunConfig())


def as_toml(config: RunConfig, keys: Iterable[str]) -> str:
    """A run file with ``keys``, and those that differ from their defaults."""
    shown = set(keys)
    present = {key: value for key, value in values(config).items() if key in shown or value != DEFAULTS[key]}
    if any(key.startswith("components.hybrid.") for key in present):
        # In a run file the section alone means one node.
        present["components.hybrid.nodes"] = config.components.hybrid.nodes
    return toml_text(present)


def toml_text(present: Mapping[str, Any]) -> str:
    """A run file with these keys."""
    sections: dict[str, list[str]] = {}
    for key, value in present.items():
        section, _, name = key.rpartition(".")
        sections.setdefault(section, [f"[{section}]"]).append(f"{name} = {toml_value(value)}")
    return "\n\n".join("\n".join(lines) for lines in sections.values())


def without_secrets(key: str, value: Any) -> Any:
    """The value of a key, or of a part of it, as others may see it."""
    if isinstance(value, Mapping):
        return {name: without_secrets(f"{key}.{name}", inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [without_secrets(key, inner) for inner in value]
    if _HIDDEN_TABLES.match(key) or re.search(_SECRET, key):
        return HIDDEN
    return _ASSIGNED.sub(rf"\1{HIDDEN}", value) if isinstance(value, str) else value


def toml_value(value: Any) -> str:
    """One value on one line; other characters than ASCII are escaped, because a terminal may not show them."""
    if isinstance(value, str):
        return '"' + "".join(_escaped(value)) + '"'
    if isinstance(value, list):
        return f"[{', '.join(map(toml_value, value))}]"
    if isinstance(value, Mapping):
        pairs = (
            f"{key if _BARE.fullmatch(key) else toml_value(key)} = {toml_value(inner)}" for key, inner in value.items()
        )
        inside = ", ".join(pairs)
        return f"{{ {inside} }}" if inside else "{}"
    return json.dumps(value)


def _escaped(text: str) -> Iterator[str]:
    for character in text:
        if character in '"\\':
            yield f"\\{character}"
        elif " " <= character <= "~":
            yield character
        else:
            yield f"\\U{ord(character):08X}"


HEADER = re.compile(r"^\s*\[([A-Za-z0-9_.-]+)\]\s*(#.*)?$")


def edited(text: str, values: Mapping[str, Any]) -> str | None:
    """``text`` with ``values`` by dotted key; None where its form does not allow that.

    Comments, order and blank lines stay, so lines are edited. Inline tables and dotted keys do not allow that.
    """
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
