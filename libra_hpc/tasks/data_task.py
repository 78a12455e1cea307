"""``data``: rows of a file, the order in which a run reads them, and a reward (``task.data``, ``task.reward``).

- JSONL -> an index of byte offsets; a row is read and decoded when a prompt begins.
- Parquet, or a folder that Hugging Face `datasets` wrote -> `pyarrow`, an extra (``pip install 'libra-hpc[parquet]'``).
- Every epoch has an order of its own, a function of seed and epoch: a resumed run goes on at the exact row.
- The prompt is a column: text, or a list of messages. A policy with a chat template gets messages through it, and text
  as the user's message; without a template, or with the option ``template = false``, text goes to the policy as it is.
- A trajectory is one turn. ``score(row, text)`` gives its reward: a number, or a dict of parts.
- It runs in a tool process with its limits; an ``async def`` awaits in the host, for a judge on the network.
- It fails, takes too long or returns something else -> the trajectory fails; that is no reward.
"""

from __future__ import annotations

import inspect
import os
from array import array
from codecs import BOM_UTF8
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol

import msgspec

from libra_hpc.errors import EnvironmentFailed, UserError, error_text, invalid
from libra_hpc.user_file import load_function

from .base import Episode, PolicyTurn, Task, Tools, Turn
from .tokenizer import ChatTemplate, TaskTokenizer, joined

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


CHECKED_ROWS = 1_000_000
"""Most rows that `DataTask.check` reads: a few seconds."""
NO_LIMIT = 2**31 - 1
"""Tokens of a turn: as many as the context has room for."""


class DataTask(Task):
    """See the module docstring; ``prompt`` is a column. ``drop_answer`` leaves out an answer at its end."""

    work = {"turns": 1}

    def __init__(
        self,
        tokenizer: TaskTokenizer,
        *,
        seed: int = 0,
        data: str = "",
        prompt: str = "prompt",
        reward: str = "",
        max_tokens: int = NO_LIMIT,
        template: bool = True,
        drop_answer: bool = False,
    ) -> None:
        super().__init__(tokenizer, seed=seed)
        if max_tokens < 1:
            raise invalid("task.options.max_tokens", max_tokens, "out of range", "an integer >= 1")
        self.max_tokens, self.stop_ids = max_tokens, tokenizer.end_ids
        self.reward, self.score = reward, load_function("task.reward", reward)
        if not inspect.iscoroutinefunction(self.score):
            self.tools = {"reward": self.score}
        self._rows, self._name, self._column, self._drop_answer = open_rows(data), Path(data).stem, prompt, drop_answer
        self._template = ChatTemplate(tokenizer) if template and tokenizer.chat_template is not None else None

    def open(self, index: int, sample: int, progress: float) -> DataEpisode:
        epoch, number = row_at(index, len(self._rows), self.seed)
        row = self._rows[number]
        found = self._prompt(number, row)
        if self._template is not None:
            messages = [{"role": "user", "content": found}] if isinstance(found, str) else found
            found = self._template.render(messages)
        elif not isinstance(found, str):
            raise self._bad(number, "holds messages, and the policy has no chat template", "text")
        return DataEpisode(self, row, self.tokenizer.encode(found), f"{self._name}-{epoch}.{number}")

    def check(self) -> None:
        for number in range(min(len(self._rows), CHECKED_ROWS)):
            self._prompt(number, self._rows[number])

    def _prompt(self, number: int, row: Row) -> str | list[dict[str, Any]]:
        if self._column not in row:
            raise self._bad(number, "is missing", list(row))
        found = row[self._column]
        if isinstance(found, str) and found:
            return found
        if not isinstance(found, list) or not found or not all(_is_message(one) for one in found):
            raise self._bad(number, f"holds {found!r:.100}", "text, or a list of messages with role and content")
        found = found[:-1] if self._drop_answer and found[-1]["role"] == "assistant" else found
        if not found or found[-1]["role"] == "assistant":
            why = "ends with the assistant's answer, which the policy would read"
            raise self._bad(number, why, "a message of the user at the end; task.options.drop_answer = true drops it")
        try:
            return [one | {"content": joined(one["content"])} for one in found]
        except UserError as error:
            raise self._bad(number, f"holds {str(error).partition(';')[0]}", "text alone") from error

    def _bad(self, number: int, why: str, valid: str | list[str]) -> UserError:
        """Return the error about the prompt's column in one row."""
        mistake = invalid("task.prompt", self._column, f"the column {why}", valid)
        return UserError(f"{self._rows.place(number)}: {mistake}")


def _is_message(one: Any) -> bool:
    return isinstance(one, dict) and isinstance(one.get("role"), str) and "content" in one


class DataEpisode(Episode):
    """One row: the policy's only turn, and its reward."""

    def __init__(self, task: DataTask, row: Row, prompt: list[int], prompt_id: str) -> None:
        self.prompt_id, self.prompt, self._task, self._row = prompt_id, prompt, task, row
        self.max_tokens, self.stop_ids = task.max_tokens, task.stop_ids

    async def step(self, turn: PolicyTurn, tools: Tools) -> Turn:
        reply = turn.tokens[:-1] if turn.stop == "stop" else turn.tokens
        found = await self._scored(self._task.tokenizer.decode(reply), tools)
        return Turn.end(found, truncated=float(turn.stop == "length"))

    async def _scored(self, text: str, tools: Tools) -> float | Mapping[str, float]:
        found: Any
        if self._task.tools:
            result = await tools.call("reward", self._row, text)
            if result.outcome != "ok":
                raise self._mistake(f"it fails ({result.value})", text)
            found = result.value
        else:
            try:
                found = await self._task.score(self._row, text)
            except EnvironmentFailed:
                raise
            except Exception as error:
                raise self._mistake(f"it fails ({type(error).__name__}: {error})", text) from error
        parts = found.values() if isinstance(found, dict) and found else [found]
        if not all(isinstance(part, int | float) for part in parts):
            raise self._mistake(f"it returned {found!r:.100}, which is no number or dict of numbers", text)
        return found

    def _mistake(self, why: str, text: str) -> UserError:
        return UserError(f"task.reward = {self._task.reward!r}: {why} for {self.prompt_id} and the text {text!r:.60}.")
