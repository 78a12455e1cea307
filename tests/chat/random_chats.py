"""Random tool conversations: a policy that samples odd tokens, and a task with two tools.

A turn is thinking, text and calls in any mixture: parallel, malformed, of unknown tools, without an end, in tokens that
the tokenizer would not have chosen; or it is cut.
"""

from __future__ import annotations

import functools
import json
import random
from typing import Any

from libra_hpc.chat.chat_task import Chat, ChatTask, tool
from libra_hpc.tasks.base import PolicyTurn, TaskTokenizer, ToolResult

TEXTS = (
    *(
        "The train leaves.",
        " a\n\n",
        "Zürich → 北京",
        "🚆👩🏽‍🚀",
        "<b>&amp;</b>",
        '"quoted" \\ {"a": 1}',
        "\t",
        "é́ ",
        "   ",
    ),
    *("None", "tool_call", "<|im", "</", "\u200b", "def f(x):\n    return x\n", "مرحبا", "\r\n", "{", "}\n"),
)


class Box:
    """A sandbox whose answers are drawn."""

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw

    async def call(self, name: str, *args: Any, **named: Any) -> ToolResult:
        return ToolResult("ok", [name, *args], 0.5)

    async def python(self, code: str) -> ToolResult:
        return ToolResult(*self.draw.choice((("ok", words(self.draw)), ("error", "exit code 1"))), 0.1)


class Look(ChatTask):
    """Rows are seeds of a conversation."""

    max_turns = 8

    def row(self, index: int) -> dict[str, Any]:
        draw = random.Random(index)
        user, system = ({"role": role, "content": words(draw)} for role in ("user", "system"))
        return {"prompt": draw.choice(([user], [system, user], user["content"])), "answers": draw.randint(0, 3)}

    @tool
    async def look(self, box: Box, thing: str, times: int = 1) -> str:
        """Look at a thing."""
        return f"{thing} " * times

    @tool(timeout_s=5)
    async def python(self, box: Box, code: str) -> ToolResult:
        """Run Python."""
        return await box.python(code)

    async def answer(self, row: Any, chat: Chat, box: Any) -> str | None:
        row["answers"] -= 1
        return words(box.draw) if row["answers"] >= 0 else None

    async def reward(self, row: Any, chat: Chat, box: Any) -> float:
        return 1.0


def words(draw: random.Random) -> str:
    return "".join(draw.choices(TEXTS, k=draw.randint(1, 6)))


def written_call(draw: random.Random, bare: bool = False) -> str:
    """``bare``: JSON without marks, as Llama writes it; more of them are bad, since a turn has one."""
    good: dict[str, Any] = {
        "look": {"thing": words(draw), "times": draw.randint(0, 3)},
        "python": {"code": words(draw)},
    }
    bad: tuple[Any, ...] = ({}, {"thing": 3}, words(draw), [1], {"thing": words(draw), "force": True})
    name = draw.choice(("look", "python"))
    arguments = good[name] if draw.random() < (0.5 if bare else 0.85) else draw.choice(bad)
    shown = name if draw.random() < 0.95 else draw.choice(("fly", "", 7))
    call = {"name": shown, "parameters" if bare else "arguments": arguments}
    body = json.dumps(call, ensure_ascii=draw.random() < 0.5)
    if draw.random() < 0.1:
        body = draw.choice((body[: draw.randint(0, len(body))], words(draw)))
    if bare:
        return body
    return f"<tool_call>\n{body}\n" + ("</tool_call>" if draw.random() < 0.97 else "")


def written_turn(draw: random.Random, bare: bool) -> str:
    if bare and draw.random() < 0.8:
        return written_call(draw, bare)
    text = ""
    if draw.random() < 0.5:
        text += f"<think>\n{words(draw)}\n" + ("</think>\n\n" if draw.random() < 0.9 else "")
    if draw.random() < 0.7:
        text += words(draw)
    if not bare and draw.random() < 0.7:
        text += "\n".join(written_call(draw) for _ in range(draw.randint(1, 3)))
    return text


def sample_turn(draw: random.Random, tokenizer: TaskTokenizer, end: int, bare: bool = False) -> PolicyTurn:
    text = written_turn(draw, bare)
    ids = [part for one in tokenizer.encode(text) for part in pieces(draw, tokenizer, one)]
    if draw.random() < 0.1:
        return PolicyTurn(ids[: draw.randint(1, max(1, len(ids)))] or [5], "length")
    return PolicyTurn([*ids, end])


def pieces(draw: random.Random, tokenizer: TaskTokenizer, one: int) -> list[int]:
    """The token, or sometimes the tokens of its characters."""
    return [one] if draw.random() < 0.7 else characters(tokenizer, one)


@functools.cache
def characters(tokenizer: TaskTokenizer, one: int) -> list[int]:
    text = tokenizer.decode([one])
    if one in tokenizer.added_ids or not text.isascii():
        return [one]
    return [part for character in text for part in tokenizer.encode(character)]
