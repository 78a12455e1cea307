"""Generate the reference of all keys of a run file from the schema: valid values, default, unit, description.

`libra-hpc config keys` prints it; ``python -m libra_hpc.config.reference > docs/configuration.md`` writes the page.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from libra_hpc.errors import UserError, nearest

from .load import describe
from .run import RunConfig
from .section import Unit

WIDTH = 80
EXAMPLE = "rollout.max_model_len"
_PAGE = """\
# Which keys can a run file have?

```
libra-hpc config keys [SECTION | SECTION.KEY] [--json]
```

prints all keys, those of a section, or one. For example:

```console
$ libra-hpc config keys {name}
{example}
```

- A run file is TOML. A key that is left out has its default.
- An unknown key is an error, and so is a value of another type.
- `-o section.key=value` replaces one value for one command.
- `libra-hpc config show RUN.toml` prints the file with all defaults.
- `libra-hpc check RUN.toml` checks the file, its model, its task and the
  cluster.

This page is written by `python -m libra_hpc.config.reference`.

{tables}"""


class ConfigKey(NamedTuple):
    """One key of a table."""

    name: str
    valid: str
    """Valid values in words."""
    unit: str
    default: Any
    text: str


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


def as_text(found: Sequence[KeyTable]) -> str:
    """Markdown of at most `WIDTH` columns, which a terminal shows as well."""
    parts = []
    for table in found:
        parts.append(f"## `[{_together(table.names)}]`")
        parts.append(textwrap.fill(table.text, WIDTH))
        parts.append("\n".join(_entry(key) for key in table.keys))
    return "\n\n".join(parts) + "\n"


def as_records(found: Sequence[KeyTable]) -> list[dict[str, Any]]:
    """One record for each key of each section, for programs."""
    return [
        {
            "key": f"{name}.{key.name}",
            "valid": key.valid,
            "unit": key.unit,
            "default": key.default,
            "description": key.text,
        }
        for table in found
        for name in table.names
        for key in table.keys
    ]


def page() -> str:
    """The text of ``docs/configuration.md``."""
    return _PAGE.format(name=EXAMPLE, example=as_text(select(EXAMPLE)).rstrip(), tables=as_text(tables()))


def _walk(section: BaseModel, name: str) -> Iterator[KeyTable]:
    """The section's own keys as a table, then the tables below it."""
    values = {key: getattr(section, key) for key in type(section).model_fields}
    fields = {key: field for key, field in type(section).model_fields.items() if not isinstance(values[key], BaseModel)}
    if fields:
        text = re.sub(r"^``\[.*?\]``: ", "", " ".join((type(section).__doc__ or "").split()))
        keys = tuple(_key(key, field, values[key]) for key, field in fields.items())
        yield KeyTable((name,), _markdown(text[:1].upper() + text[1:]), keys)
    for key, value in values.items():
        if isinstance(value, BaseModel):
            yield from _walk(value, f"{name}.{key}" if name else key)


def _key(name: str, field: FieldInfo, default: Any) -> ConfigKey:
    unit = next((rule.name for rule in field.metadata if isinstance(rule, Unit)), "")
    text = _markdown(field.description or "")
    return ConfigKey(name=name, valid=describe(field), unit=unit, default=default, text=text)


def _markdown(text: str) -> str:
    """A docstring with Markdown's quotes, in one line."""
    return " ".join(text.replace("``", "`").split())


def _together(names: Sequence[str]) -> str:
    """One name for tables with the same parent: ``components.planner|train``."""
    return "|".join([names[0], *(name.rpartition(".")[2] for name in names[1:])])


def _entry(key: ConfigKey) -> str:
    """Valid values of a key, and its description on the next line."""
    valid = re.sub(r"matching (\S+)", r"matching `\1`", key.valid)
    unit = f", in {key.unit}" if key.unit else ""
    return "\n".join(
        textwrap.fill(
            line, WIDTH, initial_indent=indent, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
        )
        for indent, line in (
            ("- ", f"`{key.name}`: {valid}{unit}; default `{json.dumps(key.default)}`."),
            ("  ", key.text),
        )
    )


if __name__ == "__main__":
    print(page(), end="")
