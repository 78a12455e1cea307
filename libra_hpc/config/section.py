"""Base class of all sections, and annotations of their fields: the unit, and valid values in words."""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

import msgspec


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One table of the run file: frozen, an unknown key is an error, and the string below a field describes it."""


class Unit(NamedTuple):
    """Unit of a number, for the reference."""

    name: str


class Valid(NamedTuple):
    """Valid values in words, where those from the type are not clear."""

    words: str


class Names(NamedTuple):
    """The value of a key, or items of its list, may name a file, which `with_absolute_paths` makes absolute."""

    kind: Literal["file", "model", "reference", "code", "program", "image", "taskset"]
    """``model``, ``reference``, ``image``: a file or another name.
    ``taskset``: a table with an interpreter and files of Python."""


PATH = "a path"
FilePath = Annotated[str, Valid(PATH), Names("file")]
"""A file or folder."""
CodePath = Annotated[str, Names("code")]
"""``path/to/file.py:Name``, or a name of the library."""
ModelName = Annotated[str, Names("model")]
"""A Hugging Face folder, or the short name of a known model."""
Seconds = Annotated[float, Unit("seconds")]
Tokens = Annotated[int, Unit("tokens")]
Bytes = Annotated[int, Unit("bytes")]
Mebibytes = Annotated[int, Unit("MiB")]
Steps = Annotated[int, Unit("steps")]
