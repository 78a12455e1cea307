"""Azure LLM inference trace: CSV ``TIMESTAMP,ContextTokens,GeneratedTokens``, one request a row.

Format: https://github.com/Azure/AzurePublicDataset (2023, 2024, 2025; further columns are ignored).  The trace has no
sessions, so each row becomes a trajectory of one turn with its own prompt.  Arrival times are ignored.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator

from libra_hpc.protocol.trace import TrajectoryRecord, TurnRecord

from .record import Bad, at_least, trajectory

CONTEXT = "ContextTokens"
GENERATED = "GeneratedTokens"


def read(lines: Iterable[tuple[int, bytes]], bad: Bad) -> Iterator[TrajectoryRecord]:
    columns: dict[str, int] = {}
    for number, line in lines:
        try:
            (row,) = csv.reader([line.decode("utf-8-sig")])
        except (ValueError, csv.Error) as error:
            bad(number, f"not a CSV row ({error})")
            continue
        if not columns:
            columns = {name.strip(): index for index, name in enumerate(row)}
            for name in (CONTEXT, GENERATED):
                if name not in columns:
                    bad(number, f"header = {','.join(row)!r}: no column {name}; valid: TIMESTAMP,{CONTEXT},{GENERATED}")
                    return
            continue
        try:
            context, generated = _count(row, columns, CONTEXT, 0), _count(row, columns, GENERATED, 1)
        except ValueError as error:
            bad(number, str(error))
        else:
            yield trajectory(f"azure/{number}", 0, context, (TurnRecord(0, generated),))


def _count(row: list[str], columns: dict[str, int], name: str, least: int) -> int:
    if columns[name] >= len(row):
        raise ValueError(f"{name}: missing; valid: {len(columns)} columns")
    text = row[columns[name]]
    try:
        count = int(text)
    except ValueError:
        raise ValueError(f"{name} = {text!r}: not a number; valid: an integer >= {least}") from None
    at_least(name, count, least)
    return count
