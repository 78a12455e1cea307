"""Common base of every section, and what a field's type can add for readers: its unit, and words for what it
accepts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """One table of the run file: frozen, an unknown key is an error, and the string below a field describes it."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, use_attribute_docstrings=True)


@dataclass(frozen=True)
class Unit:
    """Unit of a number, for the reference of keys."""

    name: str


@dataclass(frozen=True)
class Valid:
    """What a field accepts, where the words made from its type would not do."""

    words: str


Seconds = Annotated[float, Unit("seconds")]
Tokens = Annotated[int, Unit("tokens")]
Bytes = Annotated[int, Unit("bytes")]
Mebibytes = Annotated[int, Unit("MiB")]
Steps = Annotated[int, Unit("steps")]
