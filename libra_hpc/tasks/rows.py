"""Rows of a data file, and the order in which a run reads them.

- JSONL -> an index of byte offsets; a row is read and decoded when a prompt begins.
- Parquet, or a folder that Hugging Face `datasets` wrote -> `pyarrow`, an extra (``pip install 'libra-hpc[parquet]'``).
- Every epoch has an order of its own, a function of seed and epoch: a resumed run goes on at the exact row.
"""

from __future__ import annotations

import os
from array import array
from codecs import BOM_UTF8
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol

import msgspec

from libra_hpc.errors import UserError, error_text, invalid

FORM = "a .jsonl (a JSON object a line) or .parquet file, or a folder of .parquet or .arrow files of one split"
ROUNDS = 4
"""Rounds of the Feistel network that permutes an epoch; four make a permutation that looks random."""

COMPRESSED = (b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"BZh", b"\xfd7zXZ", b"PK\x03\x04")
"""First bytes of gzip, zstd, bzip2, xz and zip."""

Row = dict[str, Any]
_row = msgspec.json.Decoder(Row)


class Rows(Protocol):
    """Rows by number, from 0."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int) -> Row:
        """Raises `UserError` for a row that cannot be read."""

    def column(self, name: str) -> Iterator[Any]:
        """A value of each row in order; None where it has none."""

    def place(self, number: int) -> str:
        """Where a row is, for messages."""


def open_rows(path: str, field: str = "task.data") -> Rows:
    """Rows of a file or folder; raises `UserError` when there are none."""
    if not path or not Path(path).exists():
        raise invalid(field, path, "no such file or folder" if path else "not given", FORM)
    files = _table_files(path, field)
    try:
        rows: Rows = _ArrowRows(path, files) if files else _JsonlRows(path)
    except ImportError as error:
        raise invalid(field, path, f"it needs pyarrow ({error})", "pip install 'libra-hpc[parquet]'") from error
    except (OSError, ValueError) as error:
        raise invalid(field, path, f"it cannot be read ({error_text(error)})", FORM) from error
    if not len(rows):
        raise invalid(field, path, "it has no rows", FORM)
    return rows


def row_at(index: int, count: int, seed: int) -> tuple[int, int]:
    """Epoch and row of prompt ``index`` of the data order, of ``count`` rows."""
    epoch, place = divmod(index, count)
    half = max(1, ((count - 1).bit_length() + 1) // 2)
    while True:
        left, right = place >> half, place & ((1 << half) - 1)
        for number in range(ROUNDS):
            mixed = blake2b(f"{seed} {epoch} {number} {right}".encode(), digest_size=8).digest()
            left, right = right, left ^ (int.from_bytes(mixed) & ((1 << half) - 1))
        place = left << half | right
        if place < count:  # else the walk goes on: the network permutes the next power of four
            return epoch, place


class _JsonlRows:
    def __init__(self, path: str) -> None:
        self._path, self._starts, at = path, array("Q"), 0
        self._file = open(path, "rb")  # noqa: SIM115, read as long as the task lives
        for line in self._file:
            if not at and line.startswith(BOM_UTF8):
                # As editors of Windows begin a file.
                at, line = len(BOM_UTF8), line.removeprefix(BOM_UTF8)
            if not line.isspace():
                if not self._starts and not line.lstrip().startswith(b"{"):
                    raise ValueError(
                        "it is compressed"
                        if line.startswith(COMPRESSED)
                        else f"its first line is no JSON object: {line[:40]!r}"
                    )
                self._starts.append(at)
            at += len(line)
        self._size = at

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, number: int) -> Row:
        start = self._starts[number]
        end = self._starts[number + 1] if number + 1 < len(self) else self._size
        try:
            return _row.decode(os.pread(self._file.fileno(), end - start, start))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise UserError(f"{self.place(number)}: not a JSON object ({str(error).rstrip('.')}).") from error

    def column(self, name: str) -> Iterator[Any]:
        return (self[number].get(name) for number in range(len(self)))

    def place(self, number: int) -> str:
        head = os.pread(self._file.fileno(), self._starts[number], 0)
        line = head.count(b"\n") + 1
        return f"{self._path}:{line}"


class _ArrowRows:
    def __init__(self, path: str, files: list[Path]) -> None:
        import pyarrow
        from pyarrow import ipc, parquet

        self._path = path
        self._table = pyarrow.concat_tables(
            parquet.read_table(file, memory_map=True)
            if file.suffix == ".parquet"
            else ipc.open_stream(pyarrow.memory_map(str(file))).read_all()
            for file in files
        )

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, number: int) -> Row:
        (row,) = self._table.slice(number, 1).to_pylist()
        return dict(row)

    def column(self, name: str) -> Iterator[Any]:
        for batch in self._table.select([name]).to_batches() if name in self._table.column_names else ():
            yield from batch.column(0).to_pylist()

    def place(self, number: int) -> str:
        return f"{self._path}: row {number}"


def _table_files(path: str, field: str) -> list[Path]:
    """Files of a table, in their order; none for a JSONL file."""
    given = Path(path)
    if given.is_file():
        return [given] if given.suffix in (".parquet", ".arrow") else []
    found = sorted(file for file in given.iterdir() if file.suffix in (".parquet", ".arrow"))
    splits = {file.name.partition("-")[0] for file in found}
    if not found:
        raise invalid(field, path, "the folder has no such files", FORM)
    if len(splits) > 1:  # a test split among the training rows would be seen by nobody
        raise invalid(field, path, f"the folder has files of {', '.join(sorted(splits))}", FORM)
    return found
