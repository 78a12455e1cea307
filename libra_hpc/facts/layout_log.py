"""The log of Layouts, ``layouts.jsonl``: what every node was to be and was, at any time of a run.

- A line is a `LayoutChange` with its time ``t``, and with the way by which Layouts now reach a node where that changed.
- Every start of the ranks begins with a whole Layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from libra_hpc.protocol.layout import Layout, LayoutChange, Row
from libra_hpc.protocol.layout_changes import NOTHING, taken

from .rundir import RunDir, read_lines


class LoggedLayout(NamedTuple):
    t: float
    """Epoch seconds."""
    number: int
    layout: Layout
    """The last whole one, of an earlier number where lines between them are missing."""
    ways: dict[int, str]
    """``mpi`` or ``stream`` by node, as its newest echo says."""


def stage(row: Row) -> str:
    """``train``, ``rollout``, ``env`` or ``moving``: what a node of the run did; empty: it was lost, or is a guest."""
    if row.guest is not None or row.state == "lost":
        return ""
    return str(row.active) if row.state == "starting" else "moving" if row.state.startswith("to_") else row.state


def layout_line(t: float, change: LayoutChange, ways: Mapping[int, str]) -> dict[str, Any]:
    fields = {"t": round(t, 3), **msgspec.to_builtins(change), "ways": ways}
    return {name: value for name, value in fields.items() if name != "type" and value != {}}


def replay(run: RunDir) -> Iterator[LoggedLayout]:
    """Every Layout of a run, in order."""
    layout, ways = NOTHING, dict[int, str]()
    for line in (one for one in read_lines(run.layouts) if "digest" in one):
        change = msgspec.convert(line, LayoutChange, str_keys=True)
        if not change.since:
            layout, ways = NOTHING, {}
        layout = taken(layout, change)
        ways = ways | {int(rank): way for rank, way in line.get("ways", {}).items()}
        yield LoggedLayout(line["t"], change.number, layout, ways)
