"""Common base of every section: frozen, and an unknown key is an error."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """One table of the run file."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)
