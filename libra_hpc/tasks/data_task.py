"""``data``: rows of a file and a reward function, the run file's ``task.data`` and ``task.reward``.

- The prompt is a column: text, or a list of messages. A policy with a chat template gets messages through it, and text
  as the user's message; without a template, or with the option ``template = false``, text goes to the policy as it is.
- A trajectory is one turn. ``score(row, text)`` gives its reward: a number, or a dict of parts.
- It runs in a tool process with its limits; an ``async def`` awaits in the host, for a judge on the network.
- It fails, takes too long or returns something else -> the trajectory fails; that is no reward.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from libra_hpc.errors import EnvironmentFailed, UserError, invalid
from libra_hpc.user_file import load_function

from .base import Episode, PolicyTurn, Task, Tools, Turn
from .rows import Row, open_rows, row_at
from .tokenizer import ChatTemplate, TaskTokenizer, joined

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
