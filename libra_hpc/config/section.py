"""Base class of all sections, and annotations of their fields: the unit, and valid values in words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """One table of the run file: frozen, an unknown key is an error, and the string below a field describes it."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, use_attribute_docstrings=True)


@dataclass(frozen=True)
class Unit:
    """Unit of a number, for the reference."""

    name: str


@dataclass(frozen=True)
class Valid:
    """Valid values in words, where those from the type are not clear."""

    words: str


def one_or_each(value: Any) -> str:
    """The tag of a field that takes a value or a list."""
    return "each" if isinstance(value, list) else "one"


PATH = "a path"
FilePath = Annotated[str, Valid(PATH)]
"""A file or folder. `placed` expands it for the verbs, as it does those beside a name in one text."""
Seconds = Annotated[float, Unit("seconds")]
Tokens = Annotated[int, Unit("tokens")]
Bytes = Annotated[int, Unit("bytes")]
Mebibytes = Annotated[int, Unit("MiB")]
Steps = Annotated[int, Unit("steps")]
