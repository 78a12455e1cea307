"""The site profile: what is true of a cluster, whatever the run.

- Places: `/etc/libra-hpc/site.toml`, `~/.config/libra-hpc/site.toml`, and the file that ``LIBRA_HPC_SITE`` names.
- A later place wins over an earlier one, key by key; a run file and ``-o`` win over all of them.
- ``LIBRA_HPC_SITE=none``: no profile at all.
- The keys are those of a run file; only those that `ALLOWED` names may stand there.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from libra_hpc.errors import UserError, nearest

from .job import Component
from .load import flat, merged, read_toml, validate
from .node_groups import COMPONENTS

VARIABLE = "LIBRA_HPC_SITE"
NONE = "none"
SYSTEM = Path("/etc/libra-hpc/site.toml")
OWN = Path("~/.config/libra-hpc/site.toml")
COMPONENT_KEYS = tuple(key for key in Component.__struct_fields__ if key != "nodes")
ALLOWED: dict[str, tuple[str, ...]] = {
    "run": ("dir", "share"),
    "slurm": (),
    "compute": (),
    "planner": ("device", "devices"),
    **{f"components.{name}": COMPONENT_KEYS for name in COMPONENTS},
}
"""Sections of a site profile and the keys they may have; no keys: all of the section."""


def places(environ: Mapping[str, str] = os.environ) -> list[Path]:
    """Files that make the profile, the one that wins last; whether they exist or not."""
    named = environ.get(VARIABLE, "")
    if named == NONE:
        return []
    return [SYSTEM, OWN.expanduser(), *([Path(named).expanduser()] if named else [])]


def site_profile(environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """The profile of this machine and user, as nested tables; empty where there is none.

    Raises `UserError` for a file that cannot be read, a key that is no fact of a site, a wrong value, and for a
    missing file that ``LIBRA_HPC_SITE`` names.
    """
    values: dict[str, Any] = {}
    named = environ.get(VARIABLE, "")
    for path in places(environ):
        if not path.exists():
            if named and path == Path(named).expanduser():
                raise UserError(f"{VARIABLE} = {named!r}: there is no such file; valid: a site profile, or {NONE!r}.")
            continue
        found = read_toml(path, "site profile")
        try:
            _check(found)
            validate(found)
        except UserError as error:
            raise UserError(f"site profile {path}: {error}") from None
        values = merged(values, found)
    return values


def dotted(table: Mapping[str, Any]) -> list[str]:
    """Dotted names of all values of nested tables."""
    return [name for name, value in flat(table, ("compute.env",)).items() if value != {}]


def _check(found: Mapping[str, Any]) -> None:
    for name in dotted(found):
        section, _, key = name.rpartition(".")
        keys = ALLOWED.get(section)
        if keys is None:
            sections = sorted(ALLOWED)
            raise UserError(
                f"{name}: not a fact of a site; valid sections: {', '.join(sections)}{nearest(section, sections)}."
            )
        if keys and key not in keys:
            raise UserError(f"{name}: not a fact of a site; valid in [{section}]: {', '.join(keys)}.")
