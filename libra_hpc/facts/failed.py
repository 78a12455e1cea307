"""Failed attempts of trajectories by kind, for the status and the summary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

ERROR_CHARS = 60
"""Characters of the top error: with its label it fits in two rows of 80 columns."""


class FailedAttempts(msgspec.Struct, frozen=True):
    """Failed attempts of one kind."""

    kind: str
    """``raised`` | ``environment`` | ``timeout`` | ``reward`` | ``answer`` | ``engine`` | ``logprobs``"""
    count: int
    error: str
    """The last one."""


def failed_line(failures: Sequence[FailedAttempts]) -> str:
    """All kinds in one line, with the error of the most frequent one."""
    parts = [f"{found.count:,} {found.kind}" for found in failures]
    if parts and failures[0].error:
        error = " ".join(failures[0].error.split())
        parts[0] += f" ({error if len(error) <= ERROR_CHARS else f'{error[:ERROR_CHARS]}..'})"
    return ", ".join(parts)


def failed_in(log: Sequence[Mapping[str, Any]], status: Mapping[str, Any]) -> list[FailedAttempts]:
    """Failed attempts of a whole run, the most frequent kind first, from its events and its last status.

    An event counts for itself and for the failures before it without an event (``unsaid``).  The status has exact
    counts since the last start.
    """
    counts: dict[str, int] = {}
    errors: dict[str, str] = {}
    for event in log:
        if event["kind"] == "trajectory_failed":
            kind = str(event.get("failure", ""))
            counts[kind] = counts.get(kind, 0) + 1 + _number(event.get("unsaid"))
            errors[kind] = str(event.get("error", ""))
    last = status.get("failures")
    for entry in last if isinstance(last, list) else ():
        if isinstance(entry, dict) and (kind := str(entry.get("kind", ""))):
            counts[kind] = max(counts.get(kind, 0), _number(entry.get("count")))
            errors[kind] = str(entry.get("error", ""))
    return sorted(
        (FailedAttempts(kind, count, errors[kind]) for kind, count in counts.items()),
        key=lambda found: (-found.count, found.kind),
    )


def _number(value: object) -> int:
    return value if isinstance(value, int) else 0
