"""Load a run file and overrides into one frozen `RunConfig`; the first mistake becomes one sentence.

- A value of another TOML type (a number in quotes) -> an error, no conversion.
- An unknown key and a wrong value -> the unknown key is reported: it is usually the cause.
- An override ``section.key=value`` -> the value is TOML.
- A value that is not TOML, or not a string in a text field (``slurm.time_limit=00:30:00`` is a TOML time) -> text.
"""

from __future__ import annotations

import datetime
import math
import os
import re
import shutil
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from libra_hpc.errors import UserError, invalid
from libra_hpc.files import read_object
from libra_hpc.user_file import absolute, placed

from .learn import AGENT, INITIAL, MIXTURE, VERIFIERS
from .run import GIVEN, RunConfig
from .schema import REMOVED, find, first_mistake

PARTS = ("train", "eval")
"""Keys of ``[task]`` that are lists of tasks."""
_TOML_PLACE = re.compile(r"^(?P<what>.*?)\s*\(at line (?P<line>\d+), column (?P<column>\d+)\)$", re.DOTALL)
LARGEST = 2**63 - 1
"""Largest integer of TOML, and of the messages between the processes of a run."""
LONGEST_S = 10**9
"""Seconds, 30 years: timers of the operating system end at ten times that."""
_TASKSET = re.compile(r"\.verifiers\.(python .|\w+ .*\.py\Z)")
"""Key and value of a file in a table of verifiers."""
NAME_BYTES, PATH_BYTES = 255, 4000
"""Longest name of a file, and longest path, on all common file systems."""


def load_run_file(path: Path | str, overrides: Sequence[str] = (), below: Mapping[str, Any] | None = None) -> RunConfig:
    """Read ``path``, apply ``overrides`` in order, and validate; raises `UserError` for the first mistake.

    ``below``: values of keys that the file does not have (`libra_hpc.config.site`).
    """
    return validate(merged(below or {}, run_file_values(path, overrides)))


def run_file_values(path: Path | str, overrides: Sequence[str]) -> dict[str, Any]:
    """The tables of a run file with ``overrides``, not validated yet."""
    own = read_toml(Path(path))
    for override in overrides:
        apply_override(own, override)
    components = own.get("components")
    for name in ("hybrid", "env"):
        if isinstance(components, dict) and isinstance(components.get(name), dict):
            # A site profile may describe such nodes; only the run file adds some.
            components[name].setdefault("nodes", 1)
    return own


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Tables of ``above`` over those of ``below``, key by key; lists are replaced as a whole."""
    result = dict(below)
    for key, value in above.items():
        under = result.get(key)
        result[key] = merged(under, value) if isinstance(under, dict) and isinstance(value, dict) else value
    return result


def flat(table: Mapping[str, Any], whole: Sequence[str] = (), prefix: str = "") -> dict[str, Any]:
    """Values of nested tables by dotted key; an empty table and those in ``whole`` are values."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        name = f"{prefix}{key}"
        inner = isinstance(value, dict) and value and name not in whole
        found |= flat(value, whole, f"{name}.") if inner else {name: value}
    return found


def read_toml(path: Path, what: str = "run file") -> dict[str, Any]:
    """Parse a TOML file; raises `UserError` naming file and line, and what it is when it cannot be read."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except tomllib.TOMLDecodeError as error:
        place = _TOML_PLACE.match(str(error))
        if place is None:
            raise UserError(f"{path}: not valid TOML: {str(error).rstrip('.')}.") from error
        why = place["what"][:1].lower() + place["what"][1:]
        raise UserError(f"{path}:{place['line']}: not valid TOML: {why} (column {place['column']}).") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not valid TOML: byte {error.start} is not UTF-8.") from error
    except RecursionError as error:
        raise UserError(f"{path}: not valid TOML: it is nested too deeply.") from error
    except OSError as error:
        raise UserError(f"{path}: the {what} cannot be read: {error.strerror}.") from error


def parse_override(override: str, example: str = "algorithm.eta=2") -> tuple[str, Any]:
    """Dotted key and value of an override; raises `UserError` when it is malformed."""
    key, separator, text = override.partition("=")
    names = key.strip().split(".")
    if not separator or not all(names) or len(names) < 2:
        raise invalid("override", override, "malformed", f"section.key=value, for instance {example}")
    found = find(names)
    return ".".join(names), _override_value(text.strip(), as_text=found is not None and found.kind is str)


def apply_override(data: dict[str, Any], override: str) -> None:
    """Set one dotted key of a parsed run file; raises `UserError` when the override is malformed."""
    key, value = parse_override(override)
    names = key.split(".")
    table = data
    for depth, name in enumerate(names[:-1], start=1):
        inner = table.setdefault(name, {})
        if not isinstance(inner, dict):
            raise invalid("override", override, f"{'.'.join(names[:depth])} is a value, not a table")
        table = inner
    table[names[-1]] = value


def with_values(config: RunConfig, values: Mapping[str, Any]) -> RunConfig:
    """``config`` with the values of some dotted keys replaced; raises `UserError` when the result is not valid."""
    data = config.as_data()
    for key, value in values.items():
        _put(data, key, value)
    return msgspec.structs.replace(validate(data), given=config.given | set(values))


def with_absolute_paths(config: RunConfig) -> RunConfig:
    """``config`` for a job that starts in another folder."""
    if not config.run.dir:
        raise invalid("run.dir", config.run.dir, "not given", "a writable folder on a file system all nodes share")
    data = msgspec.to_builtins(config)
    for field, kind, text in _named(data):
        _put(data, field, _absolute(field, kind, text, config.compute.container))
    return msgspec.convert(data, RunConfig)


def named_paths(config: RunConfig) -> dict[str, str]:
    """Values that may name a file which the run reads, by key."""
    return {field: text for field, kind, text in _named(config.as_data()) if kind != "taskset"}


def _named(data: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Key, `Names.kind` and value of everything that may name a file."""
    texts = ((field, text) for field, text in _scalars(data, "") if text and isinstance(text, str))
    return [(field, kind, text) for field, text in texts if (kind := _kind_of_file(field))]


def _kind_of_file(field: str) -> str:
    key = find(field.split("."))
    return key.file if key else ""


def _absolute(field: str, kind: str, text: str, container: str) -> str:
    if kind == "code":
        return absolute(field, text)
    if kind == "program":
        return _program(field, text) if container == "none" else text
    if kind == "taskset" and not _TASKSET.search(f"{field} {text}"):
        return text
    # Pyxis takes a file by its first character, and the name of a registry otherwise.
    named = "://" in text or (container != "apptainer" and text[0] not in "/.~$")
    if (named and kind == "image") or (text == INITIAL and kind == "reference"):
        return text
    path = placed(field, text)
    return text if kind == "model" and not os.path.exists(path) else path


def _program(field: str, text: str) -> str:
    """The path of a program, where it is found."""
    return placed(field, text) if os.sep in text else shutil.which(text) or text


def _put(data: Any, key: str, value: Any) -> None:
    """Set a value of nested tables and lists by its dotted key."""
    *tables, name = key.split(".")
    for part in tables:
        data = data[int(part) if isinstance(data, list) else part]
    data[int(name) if isinstance(data, list) else name] = value


def _override_value(text: str, *, as_text: bool) -> Any:
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    except RecursionError as error:
        if as_text:
            return text
        raise invalid("override", text, "nested too deeply") from error
    # A line break could add further keys; such a value was not meant as TOML.
    if set(parsed) != {"value"} or (as_text and not isinstance(parsed["value"], str)):
        return text
    return parsed["value"]


def validate(data: Mapping[str, Any]) -> RunConfig:
    """Check a parsed run file against the schema; raises `UserError` for the first mistake."""
    try:
        _check_scalars(data)
    except RecursionError as error:
        raise UserError("The configuration is nested too deeply.") from error
    document = _implied(data)
    if GIVEN in data:
        raise first_mistake(document)
    try:
        return msgspec.convert({**document, GIVEN: list(flat(data))}, RunConfig)
    except msgspec.ValidationError as error:
        raise first_mistake(document) from error


def _check_scalars(data: Mapping[str, Any]) -> None:
    """Raise `UserError` for a value that no key may have, and for a path that is too long."""
    for field, value in _scalars(data, ""):
        if isinstance(value, float) and not math.isfinite(value):
            raise invalid(field, value, "not a finite number")
        if field.endswith("_s") and isinstance(value, (int, float)) and value > LONGEST_S:
            raise invalid(field, value, "out of range", f"at most {LONGEST_S:,} seconds")
        if isinstance(value, (datetime.date, datetime.time)):
            raise invalid(field, str(value), "a date or time must be in quotes")
        if isinstance(value, str) and _too_long(value) and _kind_of_file(field):
            valid = f"at most {PATH_BYTES} bytes, and {NAME_BYTES} for each of its names"
            raise invalid(field, value, "too long for a path", valid)
        if isinstance(value, int) and abs(value) > LARGEST:
            raise invalid(field, value, "more than 64 bits", f"an integer of at most {LARGEST}")


def _implied(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """``data`` with the name of the task that its other keys imply, and without forms of keys of older run files."""
    task, train = data.get("task"), data.get("train")
    if isinstance(task, dict):
        lists = {key: task[key] for key in PARTS if isinstance(task.get(key), list)}
        parts = {key: [_with_kind(one, "task") for one in tables] for key, tables in lists.items()}
        kind = {"name": MIXTURE} if task.get("train") else {}
        data = {**data, "task": {**kind, **_with_kind(task, "name"), **parts}}
    if isinstance(train, dict) and isinstance(train.get("recompute"), bool):
        data = {**data, "train": {**train, "recompute": "full" if train["recompute"] else "none"}}
    return data


def _with_kind(table: Any, key: str) -> Any:
    """A task's table with the name of its class, where its other keys imply one."""
    if not isinstance(table, dict):
        return table
    by_key = {"command": AGENT, "agent": AGENT, "verifiers": VERIFIERS, "data": "data"}
    implied = next((kind for name, kind in by_key.items() if table.get(name)), "")
    return {key: implied, **table} if implied else table


def _too_long(path: str) -> bool:
    text = path.encode(errors="replace")
    return len(text) > PATH_BYTES or max(map(len, text.split(b"/"))) > NAME_BYTES


def _scalars(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Every value of a nested document that is no table or list, with its dotted name."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _scalars(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _scalars(inner, f"{name}.{index}")
    else:
        yield name, value


def without_removed(data: dict[str, Any]) -> dict[str, Any]:
    """The configuration of a run without the keys of `REMOVED`, which are dropped in place, and with present values."""
    borrow = data.get("borrow")
    if isinstance(borrow, dict) and isinstance(borrow.get("lenders"), bool):
        borrow["lenders"] = "any" if borrow["lenders"] else []
    simulated, planner = data.get("simulated"), data.get("planner")
    if isinstance(simulated, dict) and isinstance(planner, dict):
        # What a dry run stands for was said there.
        for name in ("model", "device", "devices"):
            planner[name] = planner.get(name) or simulated.get(name) or ""
    for key in REMOVED:
        *sections, name = key.split(".")
        table: Any = data
        for section in sections:
            table = table.get(section) if isinstance(table, dict) else None
        if isinstance(table, dict):
            table.pop(name, None)
    return data


def load_resolved(path: Path) -> RunConfig:
    """Read a `RunDir.config` file; raises `UserError` naming the file when it is no valid configuration."""
    data = read_object(path, "the configuration of the run")
    try:
        return validate(without_removed(data))
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
