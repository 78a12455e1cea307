"""What the schema knows of each key, and the one sentence for the first mistake of a configuration.

msgspec finds a mistake; its own message names types of Python, and not the key of a table.
"""

from __future__ import annotations

import functools
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, Union

import msgspec

from libra_hpc.errors import UserError, invalid, nearest

from .run import GIVEN, RunConfig
from .section import Names, Section, Unit, Valid

_TYPE_NAMES: dict[Any, str] = {
    int: "an integer",
    float: "a number",
    str: "a string",
    bool: "true or false",
    dict: "a table",
    list: "a list",
}
_SIGNS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
"""Limits of a `msgspec.Meta`, as a sentence has them."""
_REASONS = {
    r"matching regex": "malformed",
    r"`str` of length": "too long",
    r"`array` of length >": "too short",
    r"` [<>]": "out of range",
}
"""Parts of msgspec's messages, and what they mean."""
_METRICS = "send the lines of metrics.jsonl, or use track.tensorboard or track.wandb"
_TRACE = "set task.work.trace, for instance to what `libra-hpc trace generate` wrote"
_TRAINS = "a step takes what `plan` says of the device: set planner.devices"
REMOVED = {
    "track.mlflow": _METRICS,
    "track.prometheus_port": _METRICS,
    "track.prometheus_host": _METRICS,
    "rollout.weights_transport": "weights go by TCP",
    "rollout.weights_port": "guests in another cluster use the run's own ports (docs/borrow.md)",
    "rollout.weights_mb_s": "each guest has `libra-hpc join --weights-mb-s`",
    "rollout.kv_host_gb_per_gpu": "set rollout.kv_dtype, or fewer GPUs for each engine",
    "rollout.warm_start": "the scheduler learns from this run alone",
    "planner.trace": _TRACE,
    "simulated.trace": _TRACE,
    "simulated.device": "set planner.device",
    "simulated.devices": "set planner.devices",
    "simulated.model": "set planner.model",
    "simulated.sibling": _TRACE,
    "simulated.outcome": _TRACE,
    "simulated.drift": _TRACE,
    "simulated.source": "operator tables are used where there are some; a device of planner.devices has none",
    "simulated.mfu": _TRAINS,
    "simulated.step_s": _TRAINS,
    "slurm.mpi": "leave it out, MPI needs no plugin of Slurm",
    "notify": "set slurm.mail, or read events.jsonl",
}
"""What replaces a key or section that is gone. The configuration of an older run may have it."""


class Key(NamedTuple):
    """One key of a section."""

    annotation: Any
    kind: Any
    """The type without limits."""
    limits: dict[str, Any]
    unit: str
    words: str
    """Valid values, where those of the type are not clear."""
    file: str
    """`Names.kind` where the value may name a file."""

    @property
    def section(self) -> type[Section] | None:
        """The section of a key that is a table, or a list of tables."""
        kind = typing.get_args(self.kind)[0] if typing.get_origin(self.kind) is list else self.kind
        return kind if isinstance(kind, type) and issubclass(kind, Section) else None


@functools.cache
def keys(section: type[Section]) -> dict[str, Key]:
    """The keys of a section, in the order of the reference."""
    return {one.name: _key(one.type) for one in msgspec.structs.fields(section) if one.name != GIVEN}


def _key(annotation: Any) -> Key:
    kind, limits, notes = annotation, dict[str, Any](), dict[type, str]()
    if typing.get_origin(annotation) is Annotated:
        kind = annotation.__origin__
        for rule in annotation.__metadata__:
            if isinstance(rule, msgspec.Meta):
                names = (*_SIGNS, "min_length", "max_length")
                limits |= {name: limit for name in names if (limit := getattr(rule, name)) is not None}
            else:
                notes[type(rule)] = rule[0]
    return Key(annotation, kind, limits, notes.get(Unit, ""), notes.get(Valid, ""), notes.get(Names, ""))


def find(names: Sequence[str]) -> Key | None:
    """The schema of a dotted name; of the list itself for an item of a list."""
    section: type[Section] | None = RunConfig
    key: Key | None = None
    for name in names:
        if section is None or (key is not None and name.isdecimal()):
            continue
        key = keys(section).get(name)
        if key is None:
            return None
        section = key.section
    return key


def describe(key: Key) -> str:
    """Valid values of a key in words: ``an integer >= 0``."""
    if key.words:
        return key.words
    if typing.get_origin(key.kind) is Literal:
        return " or ".join(repr(choice) for choice in typing.get_args(key.kind))
    limits = " and ".join(f"{sign} {key.limits[name]:.10g}" for name, sign in _SIGNS.items() if name in key.limits)
    least = f"with at least {key.limits['min_length']}" if "min_length" in key.limits else ""
    return " ".join(filter(None, [_kind(key), limits, least]))


def _kind(key: Key) -> str:
    """The type of a key in words."""
    origin, options = typing.get_origin(key.kind), typing.get_args(key.kind)
    if origin is list and key.section:
        return "a list of tables"
    if origin is list:
        return f"a list of {'strings' if typing.get_origin(options[0]) is not Literal else ', '.join(_choices(key))}"
    if origin in (Union, types.UnionType):
        return " or ".join(_TYPE_NAMES.get(option, str(option)) for option in options)
    return _TYPE_NAMES.get(origin or key.kind, "a table")


def _choices(key: Key) -> list[str]:
    """Valid values of a key, or of the items of a list."""
    options = typing.get_args(key.kind)
    if typing.get_origin(key.kind) is list:
        options = typing.get_args(options[0])
    return [str(choice) for choice in options]


def first_mistake(data: Mapping[str, Any]) -> UserError:
    """The sentence for a document that is not valid: for its first unknown key, the usual cause, else for a value."""
    found = list(_mistakes_of(RunConfig, data, ()))
    return min(found, key=lambda one: not one[0])[1]


def _mistakes_of(section: type[Section], table: Any, names: tuple[str, ...]) -> Iterator[tuple[bool, UserError]]:
    """Every mistake of a table, and whether it is an unknown key."""
    if not isinstance(table, Mapping):
        yield False, invalid(".".join(names), table, "wrong type", "a table")
        return
    known = keys(section)
    for name, key in known.items():
        if name in table:
            yield from _mistakes_in(key, key.annotation, table[name], (*names, name))
    for name in table:
        if name not in known:
            yield True, _unknown((*names, name), table[name], sorted(known))


def _mistakes_in(key: Key, annotation: Any, value: Any, names: tuple[str, ...]) -> Iterator[tuple[bool, UserError]]:
    """Every mistake of a key's value, or of a part of it."""
    kind = _key(annotation).kind
    if isinstance(kind, type) and issubclass(kind, Section):
        yield from _mistakes_of(kind, value, names)
        return
    try:
        msgspec.convert(value, annotation)
        return
    except msgspec.ValidationError as error:
        text = str(error)
    arms = typing.get_args(kind) if typing.get_origin(kind) in (Union, types.UnionType) else (kind,)
    part = next((arm for arm in map(_key, arms) if typing.get_origin(arm.kind) is type(value)), None)
    inner = list(_mistakes_of_parts(key, part.kind, value, names)) if part else []
    yield from inner or [(False, _wrong(key, kind, value, names, text))]


def _mistakes_of_parts(key: Key, kind: Any, value: Any, names: tuple[str, ...]) -> Iterator[tuple[bool, UserError]]:
    """Every mistake in a list, or in a table of any names."""
    if isinstance(value, list):
        for place, item in enumerate(value):
            yield from _mistakes_in(key, typing.get_args(kind)[0], item, (*names, str(place)))
        return
    of_name, of_value = typing.get_args(kind)
    for name, item in value.items():
        try:
            msgspec.convert(name, of_name)
        except msgspec.ValidationError:
            yield False, invalid(".".join(names), name, "malformed name", describe(key))
        yield from _mistakes_in(key, of_value, item, (*names, name))


def _wrong(key: Key, kind: Any, value: Any, names: Sequence[str], message: str) -> UserError:
    if typing.get_origin(kind) is Literal:
        return invalid(".".join(names), value, "unknown value", _choices(key))
    why = next((why for part, why in _REASONS.items() if re.search(part, message)), "wrong type")
    return invalid(".".join(names), value, why, describe(key))


def _unknown(names: Sequence[str], value: Any, valid: Sequence[str]) -> UserError:
    """The error for a key or section the schema does not have."""
    if instead := REMOVED.get(".".join(names)):
        return UserError(f"{'.'.join(names)}: this key is gone; {instead}.")
    where = f"[{'.'.join(names[:-1])}]" if len(names) > 1 else "the run file"
    what = (
        f"[{'.'.join(names)}]: unknown section"
        if isinstance(value, dict)
        else f"{'.'.join(names)} = {value!r}: unknown key"
    )
    return UserError(f"{what} in {where}; valid: {', '.join(valid)}{nearest(names[-1], valid)}.")
