"""Evaluations have rows of their own: no prompt of a ``[[task.eval]]`` file is among the rows that are trained on.

- Prompts are compared by digest: text as it is; one message of the user as its text.
- A prompt is in both -> refused, with the first line of both files.
- An evaluation has at most as many prompts as its file has rows.
- Data that only a task of its own can read, or that need pyarrow where it is not installed -> not compared.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any, NamedTuple

import msgspec

from libra_hpc.config.learn import EvalPart, TaskSection, TaskTable
from libra_hpc.errors import UserError, invalid
from libra_hpc.tasks.rows import Rows, open_rows


class _Prompts(NamedTuple):
    rows: Rows
    digests: list[bytes]
    """Digests of each row, in order; empty for a row without prompt."""


def check_overlap(task: TaskSection) -> list[str]:
    """Raise `UserError` for a prompt that is trained on and evaluated; returns warnings."""
    parts = {key: (name, table) for key, (name, table) in task.tables.items() if table.data}
    if len({_evaluated(key) for key in parts}) < 2:
        return []
    warnings: list[str] = []
    opened = {key: found for key, part in parts.items() if (found := _opened(key, *part, warnings)) is not None}
    places: dict[bytes, tuple[str, int]] = {}
    for key in filter(_evaluated, opened):
        _check_rows(key, parts[key][1], len(opened[key].rows))
        for number, digest in enumerate(opened[key].digests):
            places.setdefault(digest, (key, number))
    places.pop(b"", None)
    for trained in (found for key, found in opened.items() if not _evaluated(key)):
        at = next((number for number, digest in enumerate(trained.digests) if digest in places), None)
        if at is not None:
            key, own = places[trained.digests[at]]
            why = f"the prompt of {opened[key].rows.place(own)} is trained on, at {trained.rows.place(at)}"
            raise invalid(_field(key), parts[key][1].data, why, "rows of its own")
    return warnings


def _check_rows(key: str, table: TaskTable, rows: int) -> None:
    if isinstance(table, EvalPart) and table.prompts > rows:
        raise invalid(
            f"{key.rpartition('.')[0]}.prompts", table.prompts, f"its data have {rows} rows", f"at most {rows}"
        )


def _evaluated(key: str) -> bool:
    return key.startswith("task.eval.")


def _field(key: str) -> str:
    """``key`` names the table's class."""
    return f"{key.rpartition('.')[0]}.data"


def _opened(key: str, name: str, table: TaskTable, warnings: list[str]) -> _Prompts | None:
    """Rows of a table; None where they cannot be compared."""
    try:
        rows = open_rows(table.data, _field(key))
        return _Prompts(rows, [_digest(prompt) for prompt in rows.column(table.prompt or "prompt")])
    except UserError as error:
        if name == "data" and not isinstance(error.__cause__, ImportError):
            raise
        warnings.append(f"rows of evaluations and training are not compared: {error}")
        return None


def _digest(prompt: Any) -> bytes:
    match prompt:
        case [{"role": "user", "content": str(text)}]:
            prompt = text
    return blake2b(msgspec.json.encode(prompt), digest_size=16).digest() if prompt else b""
