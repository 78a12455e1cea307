"""Where each value of a configuration comes from, and the configuration as a run file.

- Layers, the one that wins last: defaults, site profile, run file, ``-o``.
- A key that holds a table (`TABLES`) is merged over the layers, so it has several sources.
- A written run file has every key that differs from its default or has a source.  So it loads to the same
  configuration with and without a site profile.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .load import apply_override, flat, run_file_values, validate
from .run import RunConfig
from .site import SiteProfile, dotted

TABLES = ("compute.env", "task.options")
"""Keys whose values are tables of any names."""
DEFAULT, OVERRIDE, RUN_FILE, SUBMIT = "default", "-o", "run file", "submit"
"""Sources besides a site profile's path.  `SUBMIT`: of a queued run, whatever its run file does not say."""
HIDDEN = "(hidden)"
"""Stands for a value that may be a secret, in what is for others."""
_SECRET = r"(?i:keys?|token|secrets?|passwords?|passwd|passphrase|credentials?)(?![a-z])"
"""In a name; ``max_tokens`` is no secret."""
_ASSIGNED = re.compile(rf"""((?:\bexport\s+\w+|{_SECRET}\w*)=)("[^"]*"|'[^']*'|\S+)""")
"""In a line of a shell, or an option."""
WIDTH = 80
_BARE = re.compile(r"[A-Za-z0-9_-]+")


def run_file_sources(path: Path, overrides: Sequence[str], profile: SiteProfile) -> dict[str, str]:
    """Source of every key that is not left at its default."""
    own = set(dotted(run_file_values(path, ())))
    changed: dict[str, Any] = {}
    for override in overrides:
        apply_override(changed, override)
    # With an override a section may get a key that it implies.
    implied = set(dotted(run_file_values(path, overrides))) - own
    site = ((f"site profile {place}", [name]) for name, place in profile.sources.items())
    return _sources([*site, (RUN_FILE, own), (OVERRIDE, implied | set(dotted(changed)))])


def queued_sources(config: RunConfig, run_file: Path) -> dict[str, str]:
    """Return `run_file_sources` of a queued run, whose configuration has what the submission filled in."""
    given = run_file_values(run_file, ())
    own, stated = values(validate(given)), _sources([(RUN_FILE, dotted(given))])
    found = {}
    for key, value in values(config).items():
        if key in stated and _same(own[key], value):
            found[key] = RUN_FILE
        elif key in stated or value != DEFAULTS[key]:
            found[key] = SUBMIT
    return found


def values(config: RunConfig) -> dict[str, Any]:
    """Dotted keys and values, in the order of the schema."""
    return flat(config.model_dump(), TABLES)


DEFAULTS = values(RunConfig())


def as_toml(config: RunConfig, keys: Iterable[str], sources: Mapping[str, str] | None = None) -> str:
    """A run file with ``keys``, those that differ from their defaults, and a comment with each ``sources``."""
    shown = set(keys)
    present = {key: value for key, value in values(config).items() if key in shown or value != DEFAULTS[key]}
    if any(key.startswith("components.hybrid.") for key in present):
        # In a run file the section alone means one node.
        present["components.hybrid.nodes"] = config.components.hybrid.nodes
    return toml_text(present, sources)


def toml_text(present: Mapping[str, Any], sources: Mapping[str, str] | None = None) -> str:
    """A run file with these keys, and a comment with each ``sources``."""
    sections: dict[str, list[str]] = {}
    for key, value in present.items():
        section, _, name = key.rpartition(".")
        line = f"{name} = {toml_value(value)}"
        note = "" if sources is None else f"# {sources.get(key, DEFAULT)}"
        if note and len(line) + len(note) + 2 > WIDTH:
            line, note = f"{note}\n{line}", ""
        sections.setdefault(section, []).append(f"{line}  {note}" if note else line)
    return "\n\n".join("\n".join([f"[{name}]", *lines]) for name, lines in sections.items())


def without_secrets(key: str, value: Any) -> Any:
    """The value of a key, or of a part of it, as others may see it."""
    if isinstance(value, Mapping):
        return {name: without_secrets(f"{key}.{name}", inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [without_secrets(key, inner) for inner in value]
    if any(f"{key}.".startswith(f"{table}.") for table in TABLES) or re.search(_SECRET, key):
        return HIDDEN
    return _ASSIGNED.sub(rf"\1{HIDDEN}", value) if isinstance(value, str) else value


def _sources(layers: Iterable[tuple[str, Iterable[str]]]) -> dict[str, str]:
    found: dict[str, str] = {}
    for source, names in layers:
        for name in names:
            key = next((table for table in TABLES if f"{name}.".startswith(f"{table}.")), name)
            before = found.get(key, source)
            found[key] = f"{before}, {source}" if key in TABLES and before != source else source
    return found


def _same(given: Any, resolved: Any) -> bool:
    """Whether a value of a run file is the resolved one, which has absolute paths."""
    if isinstance(given, str) and isinstance(resolved, str) and given:
        return given == resolved or resolved.endswith(f"/{given.removeprefix('./')}")
    return bool(given == resolved)


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
