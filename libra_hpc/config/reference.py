"""The reference of all keys of a run file, from the schema: valid values, default, unit, description.

`libra-hpc config explain` prints it, and docs/configuration.md has all of it (`tests.docs.keys_page`).
"""

from __future__ import annotations

import ast
import inspect
import itertools
import json
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from libra_hpc.errors import UserError, nearest

from .job import Component
from .run import RunConfig
from .schema import Key, describe, keys
from .section import PATH, Section
from .site import ALLOWED

WIDTH = 80
PATHS = "A path is relative to the folder where you type, and `~` and `$NAME` in it are expanded there."


class ConfigKey(NamedTuple):
    """One key of a table."""

    name: str
    valid: str
    """Valid values in words."""
    unit: str
    default: Any
    text: str
    also_in: tuple[str, ...] = ()
    """Where the value may stand besides a run file and ``-o``."""


class KeyTable(NamedTuple):
    """A section of the run file, or several that have the same keys."""

    names: tuple[str, ...]
    text: str
    keys: tuple[ConfigKey, ...]


def tables() -> list[KeyTable]:
    """All sections in the order of the schema; neighbours with the same keys and defaults are one table."""
    found: list[KeyTable] = []
    for table in _walk(RunConfig(), ""):
        if found and found[-1][1:] == table[1:]:
            found[-1] = found[-1]._replace(names=found[-1].names + table.names)
        else:
            found.append(table)
    return found


def select(wanted: str) -> list[KeyTable]:
    """The tables of a section, or a table with one key; raises `UserError` for any other name."""
    everything = tables()
    found = [table for table in everything if any(f"{name}.".startswith(f"{wanted}.") for name in table.names)]
    if found:
        return found
    section, _, key = wanted.rpartition(".")
    for table in everything:
        keys = tuple(one for one in table.keys if one.name == key)
        if section in table.names and keys:
            return [KeyTable((section,), table.text, keys)]
    known = [name for table in everything for name in table.names]
    known += [f"{name}.{key.name}" for table in everything for name in table.names for key in table.keys]
    raise UserError(f"KEY = {wanted!r}: no such section or key{nearest(wanted, known)}.")


def as_text(found: Sequence[KeyTable], present: Mapping[str, Any] | None = None) -> str:
    """Markdown of at most `WIDTH` columns, which a terminal shows as well; ``present``: by dotted key."""
    parts, first = [], dict[str, KeyTable]()
    for table in found:
        parts.append(f"## `[{_together(table.names)}]`")
        parts.append(textwrap.fill(table.text, WIDTH))
        # Components have keys in common, and so have tasks: described once, unless each has a value.
        like = first.setdefault(table.names[0].rpartition(".")[0], table)
        own = [key for key in table.keys if key not in like.keys or like is table or present]
        entries = [_entry(key, _present(table.names, key.name, present or {})) for key in own]
        if known := [f"`{key.name}`" for key in table.keys if key not in own]:
            entries.append(_filled("- ", f"{', '.join(known)}: as in `[{like.names[0]}]`."))
        parts.append("\n".join(entries))
    if any(key.valid == PATH for table in found for key in table.keys):
        parts.append(textwrap.fill(PATHS, WIDTH))
    return "\n\n".join(parts) + "\n"


def as_records(found: Sequence[KeyTable], present: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
    """One record for each key of each section, for programs; ``present``: by dotted key."""
    return [
        {
            "key": f"{name}.{key.name}",
            "valid": key.valid,
            "unit": key.unit,
            "default": key.default,
            "description": key.text,
            "set_in": ["run file", *key.also_in],
            **({} if present is None else {"value": present[f"{name}.{key.name}"]}),
        }
        for table in found
        for name in table.names
        for key in table.keys
    ]


def _walk(section: Section, name: str) -> Iterator[KeyTable]:
    """The section's own keys as a table, then the tables below it."""
    kind = type(section)
    known, texts = keys(kind), _descriptions(kind)
    own = {key: found for key, found in known.items() if not isinstance(getattr(section, key), Section)}
    if own:
        text = re.sub(r"^``\[.*?\]``: ", "", " ".join((kind.__doc__ or "").split()))
        entries = tuple(_key(name, key, found, getattr(section, key), texts[key]) for key, found in own.items())
        yield KeyTable((name,), _markdown(text[:1].upper() + text[1:]), entries)
    for key, found in known.items():
        if found.section:
            below = found.section() if key in own else getattr(section, key)
            yield from _walk(below, f"{name}.{key}" if name else key)


def _descriptions(section: type[Section]) -> dict[str, str]:
    """The strings below the keys of a section, from its source."""
    found: dict[str, str] = {}
    for kind in reversed([kind for kind in section.__mro__ if issubclass(kind, Section)]):
        (defined,) = ast.parse(inspect.getsource(kind)).body
        body = defined.body if isinstance(defined, ast.ClassDef) else []
        for key, text in itertools.pairwise(body):
            if isinstance(key, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                found[ast.unparse(key.target)] = str(text.value.value)
    return found


def _key(section: str, name: str, key: Key, default: Any, text: str) -> ConfigKey:
    return ConfigKey(name, describe(key), key.unit, default, _markdown(text), _also_in(section, name))


def _also_in(section: str, name: str) -> tuple[str, ...]:
    """Where a key may stand besides a run file: a site profile, or every component of its own."""
    keys = ALLOWED.get(section)
    site = ("site profile",) if keys is not None and (not keys or name in keys) else ()
    return (*site, *((f"components.*.{name}",) if section == "slurm" and name in Component.__struct_fields__ else ()))


def _present(names: Sequence[str], key: str, present: Mapping[str, Any]) -> str:
    """The values of a key in the sections of one table, in words."""
    found = {name: present[f"{name}.{key}"] for name in names if f"{name}.{key}" in present}
    texts = {name: f"`{json.dumps(value)}`" for name, value in found.items()}
    if len(set(texts.values())) <= 1:
        return "".join(f"Now {text}." for text in list(texts.values())[:1])
    each = ", ".join(f"{name.rpartition('.')[2]} {text}" for name, text in texts.items())
    return f"Now {each}."


def _markdown(text: str) -> str:
    """A docstring with Markdown's quotes, in one line."""
    return " ".join(text.replace("``", "`").split())


def _together(names: Sequence[str]) -> str:
    """One name for tables with the same parent: ``components.planner|train``."""
    return "|".join([names[0], *(name.rpartition(".")[2] for name in names[1:])])


def _entry(key: ConfigKey, present: str) -> str:
    """Valid values of a key, and below them its description, where else it may stand, and its present value."""
    unit = f", in {key.unit}" if key.unit else ""
    also = f" Also allowed in: {', '.join(key.also_in)}." if key.also_in else ""
    lines = [("- ", f"`{key.name}`: {key.valid}{unit}; default `{json.dumps(key.default)}`."), ("  ", key.text + also)]
    return "\n".join(_filled(indent, line) for indent, line in [*lines, *([("  ", present)] if present else [])])


def _filled(indent: str, line: str) -> str:
    return textwrap.fill(
        line, WIDTH, initial_indent=indent, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )
