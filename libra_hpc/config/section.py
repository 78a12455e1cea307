"""Base class of all sections, and annotations of their fields: the unit, and valid values in words."""

from __future__ import annotations

from typing import Annotated, NamedTuple

import msgspec


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One table of the run file: frozen, an unknown key is an error, and the string below a field describes it."""


class Unit(NamedTuple):
    """Unit of a number, for the reference."""

    name: str


class Valid(NamedTuple):
    """Valid values in words, where those from the type are not clear."""

    words: str


PATH = "a path"
FilePath = Annotated[str, Valid(PATH)]
"""A file or folder. `placed` expands it for the verbs, as it does those beside a name in one text."""
Seconds = Annotated[float, Unit("seconds")]
Tokens = Annotated[int, Unit("tokens")]
Bytes = Annotated[int, Unit("bytes")]
Mebibytes = Annotated[int, Unit("MiB")]
Steps = Annotated[int, Unit("steps")]
