"""What a run takes of GPUs and hosts, as a table and as plain data: `libra-hpc check`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from libra_hpc.preflight.gpu_memory import MemoryNeed

from .output import narrow_table

COLUMNS = 80
"""Width of the table: a terminal of usual width shows it whole."""


def memory_table(found: Sequence[MemoryNeed]) -> Table:
    """A row for each, with its terms from large to small."""
    table = narrow_table("memory, GB~", "needs>~", "has>~", "terms~", width=COLUMNS)
    for row in found:
        largest = sorted(row.terms.items(), key=lambda term: -term[1])
        terms = ", ".join(f"{name} {_gb(size)}" for name, size in largest if size)
        table.add_row(row.where, _gb(row.needs), "?" if row.has is None else _gb(row.has), terms)
    return table


def as_records(found: Sequence[MemoryNeed]) -> list[dict[str, Any]]:
    """Plain data, in bytes."""
    return [{"where": row.where, "needs": row.needs, "has": row.has, "terms": dict(row.terms)} for row in found]


def _gb(size: float) -> str:
    return f"{size / 1e9:,.0f}" if size >= 100e9 else f"{size / 1e9:.1f}"
