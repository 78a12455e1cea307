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
    """A section of the run file."""

    name: str
    text: str
    keys: tuple[ConfigKey, ...]


def tables() -> list[KeyTable]:
    """All sections in the order of the schema."""
    return list(_walk(RunConfig(), ""))


def select(wanted: str) -> list[KeyTable]:
    """The tables of a section, or a table with one key; raises `UserError` for any other name."""
    everything = tables()
    if found := [table for table in everything if f"{table.name}.".startswith(f"{wanted}.")]:
        return found
    single = {f"{table.name}.{key.name}": table._replace(keys=(key,)) for table in everything for key in table.keys}
    if wanted in single:
        return [single[wanted]]
    raise UserError(
        f"KEY = {wanted!r}: no such section or key{nearest(wanted, [*(table.name for table in everything), *single])}."
    )


def as_text(found: Sequence[KeyTable], present: Mapping[str, Any] | None = None) -> str:
    """Markdown of at most `WIDTH` columns, which a terminal shows as well; ``present``: by dotted key."""
    parts, first = [], dict[tuple[str, ...], str]()
    for table in found:
        parts.append(f"## `[{table.name}]`")
        parts.append(textwrap.fill(table.text, WIDTH))
        # Components have keys in common, and so have tasks: described once, unless each has a value.
        entries, known = [], dict[str, list[str]]()
        for key in table.keys:
            before = first.setdefault((key.name, key.valid, json.dumps(key.default), key.text), table.name)
            if before == table.name or present:
                name = f"{table.name}.{key.name}"
                entries.append(
                    _entry(key, f"Now `{json.dumps(present[name])}`." if present and name in present else "")
                )
            else:
                known.setdefault(before, []).append(f"`{key.name}`")
        entries += [_filled("- ", f"{', '.join(names)}: as in `[{like}]`.") for like, names in known.items()]
        parts.append("\n".join(entries))
    if any(key.valid == PATH for table in found for key in table.keys):
        parts.append(textwrap.fill(PATHS, WIDTH))
    return "\n\n".join(parts) + "\n"


def as_records(found: Sequence[KeyTable], present: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
    """One record for each key of each section, for programs; ``present``: by dotted key."""
    return [
        {
            "key": f"{table.name}.{key.name}",
            "valid": key.valid,
            "unit": key.unit,
            "default": key.default,
            "description": key.text,
            "set_in": ["run file", *key.also_in],
            **({} if present is None else {"value": present[f"{table.name}.{key.name}"]}),
        }
        for table in found
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
        yield KeyTable(name, _markdown(text[:1].upper() + text[1:]), entries)
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


def _markdown(text: str) -> str:
    """A docstring with Markdown's quotes, in one line."""
    return " ".join(text.replace("``", "`").split())


def _entry(key: ConfigKey, present: str) -> str:
    """Valid values of a key, and below them its description, where else it may stand, and its present value."""
    unit = f", in {key.unit}" if key.unit else ""
    also = f" Also allowed in: {', '.join(key.also_in)}." if key.also_in else ""
    valid = re.sub(r"^an? ", "", key.valid)
    lines = [("- ", f"`{key.name}`: {valid}{unit}; default `{json.dumps(key.default)}`."), ("  ", key.text + also)]
    return "\n".join(_filled(indent, line) for indent, line in [*lines, *([("  ", present)] if present else [])])


def _filled(indent: str, line: str) -> str:
    return textwrap.fill(
        line, WIDTH, initial_indent=indent, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )
