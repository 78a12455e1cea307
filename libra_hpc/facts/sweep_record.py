"""Which sweep a run belongs to.

- ``<run>/sweep.json``: name of the sweep and the run's values.
- ``<run.dir>/sweep-NAME.json``: what all runs of a sweep share, and the runs it consists of.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from libra_hpc.errors import UserError
from libra_hpc.files import OWNER_ONLY, read_or_none, write_atomic

from .rundir import RunDir


class SweepMember(msgspec.Struct, frozen=True):
    """One run of a sweep."""

    sweep: str
    values: dict[str, Any]
    """By dotted key."""


class PlannedRun(msgspec.Struct, frozen=True):
    """One combination of a sweep."""

    name: str
    """``run.name``; its run directory has a number as well."""
    values: dict[str, Any]


class SweepRecord(msgspec.Struct, frozen=True):
    """The record of a whole sweep."""

    keys: list[str]
    """Dotted keys that the runs differ in."""
    shared: dict[str, Any]
    """The configuration without ``run.name`` and ``keys``, flat."""
    runs: list[PlannedRun]


_member, _sweep = msgspec.json.Decoder(SweepMember), msgspec.json.Decoder(SweepRecord)


def write_member(run: RunDir, member: SweepMember) -> None:
    """Record that ``run`` belongs to a sweep."""
    write_atomic(run.sweep, msgspec.json.encode(member) + b"\n", OWNER_ONLY)


def read_member(run: RunDir) -> SweepMember | None:
    """The sweep of a run; None where it belongs to none."""
    return read_or_none(run.sweep, _member)


def members(runs: Sequence[RunDir], sweep: str) -> list[tuple[RunDir, SweepMember]]:
    """Return the runs that belong to one sweep."""
    return [(run, found) for run in runs if (found := read_member(run)) is not None and found.sweep == sweep]


def sweep_file(parent: Path, name: str) -> Path:
    """Record of the sweep ``name`` among the runs of ``parent``."""
    return parent / f"sweep-{name}.json"


def write_sweep(parent: Path, name: str, record: SweepRecord) -> None:
    """Write the record of a sweep, replacing an earlier one; raises `OSError`."""
    parent.mkdir(parents=True, exist_ok=True)
    write_atomic(
        sweep_file(parent, name), msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n", OWNER_ONLY
    )


def read_sweep(parent: Path, name: str) -> SweepRecord | None:
    """The record of a sweep; None where there is none.  Raises `UserError` when it cannot be read."""
    path = sweep_file(parent, name)
    try:
        return _sweep.decode(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"{path}: the record of the sweep cannot be read: {error}.") from error
