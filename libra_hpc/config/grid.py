"""The grid of a sweep: every combination of the values that ``--over KEY=V1,V2`` gives, with a short name for each.

Values stay text: as overrides of the run file they are parsed and checked like any other.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from libra_hpc.errors import UserError, invalid

from .job import NAME_LENGTH
from .load import parse_override

OPENING, CLOSING, QUOTES = "[{", "]}", "\"'"
OWN_KEYS = ("run.name", "run.dir")
"""Keys that a sweep sets itself, or that must be the same for its runs."""
EXAMPLE = "optimizer.lr=1e-6,3e-6"


class Axis(NamedTuple):
    """One key and the values it takes."""

    key: str
    texts: tuple[str, ...]
    """Values as the user wrote them."""
    values: tuple[Any, ...]


class Combination(NamedTuple):
    """One value of every axis."""

    name: str
    """What distinguishes it, as a part of ``run.name``: ``lr3e-6.seed0``."""
    overrides: tuple[str, ...]
    values: dict[str, Any]

    @property
    def words(self) -> str:
        """The combination for a sentence."""
        return ", ".join(self.overrides)


def parse_axis(text: str) -> Axis:
    """Read ``KEY=V1,V2``; raises `UserError` when it is malformed or a value occurs twice."""
    key, separator, values = text.partition("=")
    texts = split_values(values)
    if not separator or not all(texts):
        raise invalid("--over", text, "malformed", f"section.key=value,value, for instance {EXAMPLE}")
    parsed = [parse_override(f"{key}={value}", EXAMPLE) for value in texts]
    name = parsed[0][0]
    if name in OWN_KEYS:
        raise invalid("--over", text, f"the runs of a sweep have the {name} of the run file", "any other key")
    found: list[Any] = []
    for value, (_, one) in zip(texts, parsed, strict=True):
        if one in found:
            raise invalid("--over", text, f"the value {value} occurs twice")
        found.append(one)
    return Axis(name, tuple(texts), tuple(found))


def split_values(text: str) -> list[str]:
    """Split at the commas outside brackets and quotes."""
    parts, depth, quote = [""], 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in QUOTES:
            quote = character
        elif character in OPENING:
            depth += 1
        elif character in CLOSING:
            depth -= 1
        elif character == "," and depth <= 0:
            parts.append("")
            continue
        parts[-1] += character
    return [part.strip() for part in parts]


def parse_axes(texts: Sequence[str]) -> list[Axis]:
    """Read every ``--over``; raises `UserError` when a key occurs twice."""
    axes = [parse_axis(text) for text in texts]
    keys = [axis.key for axis in axes]
    for key in keys:
        if keys.count(key) > 1:
            raise UserError(f"--over {key}: the key occurs twice; give all its values in one --over {key}=V1,V2.")
    return axes


def size(axes: Sequence[Axis]) -> int:
    """Number of combinations."""
    return math.prod(len(axis.texts) for axis in axes)


def combinations(axes: Sequence[Axis], run_name: str) -> list[Combination]:
    """The product of the axes, the last one fastest.

    Where names of values would be equal, or longer than ``run.name`` may be, the runs are numbered.
    """
    labels = short_keys([axis.key for axis in axes])
    chosen = list(itertools.product(*(range(len(axis.texts)) for axis in axes)))
    names = [
        ".".join(label(labels[axis.key], plain(axis.texts[i])) for axis, i in zip(axes, picks, strict=True))
        for picks in chosen
    ]
    room = NAME_LENGTH - len(run_name) - 1
    if len(set(names)) < len(names) or max(map(len, names)) > room:
        names = [f"{number:03d}" for number in range(1, len(names) + 1)]
    return [
        Combination(
            name,
            tuple(f"{axis.key}={axis.texts[i]}" for axis, i in zip(axes, picks, strict=True)),
            {axis.key: axis.values[i] for axis, i in zip(axes, picks, strict=True)},
        )
        for name, picks in zip(names, chosen, strict=True)
    ]


def short_keys(keys: Sequence[str]) -> dict[str, str]:
    """Last name of each dotted key; the whole key where two would be equal."""
    last = {key: key.rpartition(".")[2] for key in keys}
    names = list(last.values())
    return {key: name if names.count(name) == 1 else key for key, name in last.items()}


def label(key: str, value: str) -> str:
    """A key and its value in a name: ``lr3e-6``, ``batch_order_finish``."""
    return f"{key}{value}" if value[0].isdigit() else f"{key}_{value}"


def plain(text: str) -> str:
    """A value with the characters that ``run.name`` allows; of a path the last part."""
    return re.sub(r"[^A-Za-z0-9.-]+", "_", text.strip("\"'").rstrip("/").rpartition("/")[2]).strip("_.-") or "empty"
