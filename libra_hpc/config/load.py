"""Load a run file and overrides into one frozen `RunConfig`; the first mistake becomes one sentence.

- A value of another TOML type (a number in quotes) -> an error, no conversion.
- An unknown key and a wrong value -> the unknown key is reported: it is usually the cause.
- An override ``section.key=value`` -> the value is TOML.
- A value that is not TOML, or not a string in a text field (``slurm.time_limit=00:30:00`` is a TOML time) -> text.
"""

from __future__ import annotations

import datetime
import math
import re
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Union

import annotated_types
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from libra_hpc.errors import UserError, invalid, nearest
from libra_hpc.files import read_object

from .run import RunConfig
from .section import Valid

_TOML_PLACE = re.compile(r"^(?P<what>.*?)\s*\(at line (?P<line>\d+), column (?P<column>\d+)\)$", re.DOTALL)
_TYPE_NAMES: dict[Any, str] = {
    int: "an integer",
    float: "a number",
    str: "a string",
    bool: "true or false",
    dict: "a table",
    list: "a list",
}
_BRANCHES = ("one", "each")
"""Names that pydantic adds to the location of an error in a `PerNode` field."""
LARGEST = 2**63 - 1
"""Largest integer of TOML, and of the messages between the processes of a run."""
LONGEST_S = 10**9
"""Seconds, 30 years: timers of the operating system end at ten times that."""
NAME_BYTES, PATH_BYTES = 255, 4000
"""Longest name of a file, and longest path, on all common file systems."""
PATHS = (
    *("run.dir", "model.path", "task.name", "rollout.policy", "rollout.warm_start", "compute.python", "compute.image"),
    *("algorithm.advantage", "algorithm.loss", "algorithm.reference", "task.data", "task.reward"),
    *(f"planner.{key}" for key in ("trace", "train_speed", "devices", "model")),
    *(f"simulated.{key}" for key in ("trace", "calibration", "devices", "model")),
    "slurm.template",
)
"""Keys that may name a file."""
_METRICS = "send the lines of metrics.jsonl, or use track.tensorboard or track.wandb"
REMOVED = {"track.mlflow": _METRICS, "track.prometheus_port": _METRICS, "track.prometheus_host": _METRICS}
"""What replaces a key or section that is gone. The configuration of an older run may have it."""
_RANGE_ERRORS = ("greater_than", "greater_than_equal", "less_than", "less_than_equal")


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
    if isinstance(components, dict) and isinstance(components.get("hybrid"), dict):
        # A site profile may describe hybrid nodes; only the run file adds some.
        components["hybrid"].setdefault("nodes", 1)
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
    field = _field(names)
    return ".".join(names), _override_value(text.strip(), as_text=field is not None and field.annotation is str)


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
    data = config.model_dump()
    for key, value in values.items():
        *tables, name = key.split(".")
        table = data
        for part in tables:
            table = table[part]
        table[name] = value
    return validate(data)


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
        for field, value in _scalars(data, ""):
            if isinstance(value, float) and not math.isfinite(value):
                raise invalid(field, value, "not a finite number")
            if field.endswith("_s") and isinstance(value, (int, float)) and value > LONGEST_S:
                raise invalid(field, value, "out of range", f"at most {LONGEST_S:,} seconds")
            if isinstance(value, (datetime.date, datetime.time)):
                raise invalid(field, str(value), "a date or time must be in quotes")
            if field in PATHS and isinstance(value, str) and _too_long(value):
                valid = f"at most {PATH_BYTES} bytes, and {NAME_BYTES} for each of its names"
                raise invalid(field, value, "too long for a path", valid)
            if isinstance(value, int) and abs(value) > LARGEST:
                raise invalid(field, value, "more than 64 bits", f"an integer of at most {LARGEST}")
    except RecursionError as error:
        raise UserError("The configuration is nested too deeply.") from error
    try:
        return RunConfig.model_validate(data, strict=True)
    except ValidationError as error:
        first = min(error.errors(), key=lambda e: e["type"] != "extra_forbidden")
        raise translate(first) from error


def translate(error: ErrorDetails) -> UserError:
    """Turn a pydantic error into one sentence: field, value, what is valid, nearest match."""
    names = [str(part) for part in error["loc"] if part not in _BRANCHES]
    dotted, value, kind = ".".join(names), error["input"], error["type"]
    if kind == "extra_forbidden":
        return _unknown(names, value)
    if names[-1:] == ["[key]"]:
        # pydantic's location of a table's key; the key itself is the value.
        return invalid(".".join(names[:-2]), value, "malformed name", _described(names[:-2]))
    field = _field(names)
    if field is None:
        return invalid(dotted, value, "wrong type", "a table" if kind == "model_type" else "")
    if kind == "literal_error":
        return invalid(dotted, value, "unknown value", _choices(field))
    if kind == "model_type":
        return invalid(dotted, value, "wrong type", "a table")
    if kind in _RANGE_ERRORS:
        why = "out of range"
    elif kind == "string_pattern_mismatch":
        why = "malformed"
    elif kind == "string_too_long":
        why = "too long"
    elif kind == "too_short":
        why = "too short"
    else:
        why = "wrong type"
    return invalid(dotted, value, why, describe(field))


def _unknown(names: Sequence[str], value: Any) -> UserError:
    """The error for a key or section the schema does not have."""
    if instead := REMOVED.get(".".join(names)):
        return UserError(f"{'.'.join(names)}: this key is gone; {instead}.")
    parent = _section(names[:-1])
    valid = sorted(parent.model_fields) if parent else []
    where = f"[{'.'.join(names[:-1])}]" if len(names) > 1 else "the run file"
    what = (
        f"[{'.'.join(names)}]: unknown section"
        if isinstance(value, dict)
        else f"{'.'.join(names)} = {value!r}: unknown key"
    )
    return UserError(f"{what} in {where}; valid: {', '.join(valid)}{nearest(names[-1], valid)}.")


def _choices(field: FieldInfo) -> list[str]:
    """Valid values of a field, or of the items of a list."""
    options = typing.get_args(field.annotation)
    if typing.get_origin(field.annotation) is list:
        options = typing.get_args(options[0])
    return [str(choice) for choice in options]


def _described(names: Sequence[str]) -> str:
    """Valid values of a dotted key in words; empty where the schema does not have it."""
    field = _field(names)
    return "" if field is None else describe(field)


def describe(field: FieldInfo) -> str:
    """Valid values of a field in words: ``an integer >= 0``."""
    for rule in field.metadata:
        if isinstance(rule, Valid):
            return rule.words
    if typing.get_origin(field.annotation) is Literal:
        return " or ".join(repr(choice) for choice in typing.get_args(field.annotation))
    limits = [f"{sign} {bound:.10g}" for sign, bound in _bounds(field)]
    rest = [f"with at least {m.min_length}" for m in field.metadata if isinstance(m, annotated_types.MinLen)]
    rest += [f"of at most {m.max_length} characters" for m in field.metadata if isinstance(m, annotated_types.MaxLen)]
    return " ".join(filter(None, [_kind(field), " and ".join(limits), *rest]))


def _kind(field: FieldInfo) -> str:
    """The type of a field in words."""
    kind = field.annotation
    origin, options = typing.get_origin(kind), typing.get_args(kind)
    if origin is list and section_of(field):
        return "a list of tables"
    if origin is list:
        item = typing.get_origin(options[0]) or options[0]
        return f"a list of {'strings' if item in (str, Annotated) else ', '.join(_choices(field)) or 'values'}"
    if origin in (Union, types.UnionType):
        return " or ".join(_TYPE_NAMES.get(option, str(option)) for option in options)
    return _TYPE_NAMES.get(origin or kind, "a table")


def _bounds(field: FieldInfo) -> Iterator[tuple[str, float]]:
    signs = {
        annotated_types.Ge: (">=", "ge"),
        annotated_types.Gt: (">", "gt"),
        annotated_types.Le: ("<=", "le"),
        annotated_types.Lt: ("<", "lt"),
    }
    for rule in field.metadata:
        if type(rule) in signs:
            sign, attribute = signs[type(rule)]
            yield sign, getattr(rule, attribute)


def _section(names: Sequence[str]) -> type[BaseModel] | None:
    """The pydantic model of a dotted section name, of a table of a list too."""
    model: type[BaseModel] = RunConfig
    for name in names:
        if name.isdecimal():
            continue
        field = model.model_fields.get(name)
        inner = None if field is None else section_of(field)
        if inner is None:
            return None
        model = inner
    return model


def section_of(field: FieldInfo) -> type[BaseModel] | None:
    """The model of a field that is a table, or a list of tables."""
    kind = field.annotation
    if typing.get_origin(kind) is list:
        kind = typing.get_args(kind)[0]
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def _field(names: Sequence[str]) -> FieldInfo | None:
    """The schema of a dotted field name; of the list itself for an item of a list."""
    parent = _section(names[:-1])
    if parent is not None:
        return parent.model_fields.get(names[-1])
    return _field(names[:-1]) if len(names) > 1 else None


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
    """The configuration of a run without the keys of `REMOVED`, which are dropped in place."""
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
