"""How one model's chat is written and read in tokens; a turn of the policy is never rendered.

- `Dialect.first`: the prompt of a conversation, as the model's own template writes it.
- `Dialect.parse`: the policy's text of one turn: text, thinking, tool calls.
- `Dialect.stopped`: where a stop string ends it.
- `Dialect.delta`: what follows a turn: the end of a turn that was cut, new messages, the start of the next turn.

What follows is the difference of two renderings of the template around a dummy turn. Calls are read by that parser of
the library `renderers` which reads back a call that the template wrote. `selftest.py` proves all of it before the first
episode.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal

import msgspec
from renderers.base import ParsedResponse, ParsedToolCall
from renderers.parsing import parse_llama_3, parse_qwen3, parse_qwen35

from libra_hpc.errors import invalid
from libra_hpc.tasks.tokenizer import ChatTemplate, Message, TaskTokenizer

TAIL = 64
"""Tokens of the context before a turn that `parse` and `delta` see: enough for the start of the assistant's turn, so
neither costs more in a long context.
"""
OPENING = 16
"""Tokens of it that have the start of thinking and white space behind that, also where the mark is no token."""
Calls = Literal["json", "xml", "bare json"]
"""How tool calls are written: JSON or XML in a ``<tool_call>`` of its own, or a turn that is one JSON object."""
ABSENT = -1
"""Id of a mark that the tokenizer lacks."""
DUMMY = "libra4dummy7turn"
"""Content of the dummy turn; no template changes or splits it."""
DUMMY_ID = "call00000"
"""Id of the dummy turn's call: nine letters and digits, as Mistral's templates want."""
ERRORS = {
    "invalid_json": "the tool call is no valid JSON",
    "unclosed_block": "the tool call has no end",
    "missing_name": "the tool call has no name",
}
"""In words, by the parser's status; others are "malformed"."""


class BridgeError(Exception):
    """The context is not what was sampled plus what was added."""


class ToolCall(msgspec.Struct, frozen=True):
    """One attempt of the policy to call a tool."""

    name: str
    arguments: Any
    """The arguments that the policy wrote: mostly a mapping."""
    raw: str
    error: str = ""
    """Why it cannot be read; empty: it can."""


class Reply(msgspec.Struct, frozen=True):
    """The policy's text of one turn."""

    text: str
    thinking: str = ""
    calls: tuple[ToolCall, ...] = ()


class Dialect:
    """A policy's chat; ``calls`` names what reads its tool calls. Raises `UserError` where turns have no end token.

    ``tools`` are JSON schemas in OpenAI's form, ``tail`` the last tokens of the context before a turn.
    """

    def __init__(self, tokenizer: TaskTokenizer, template: ChatTemplate, calls: Calls = "json") -> None:
        self._tokenizer, self.template, self.calls = tokenizer, template, calls
        self._library_tokenizer = LibraryTokenizer(tokenizer)
        rendered = template.render([{"role": "user", "content": "x"}, {"role": "assistant", "content": DUMMY}])
        end = tokenizer.encode(rendered.partition(DUMMY)[2])[:1]
        self._end = tokenizer.decode(end)
        ends = {*end, *tokenizer.end_ids}
        if not end or end[0] not in tokenizer.added_ids:
            why = f"its chat template ends the assistant's turn with {self._end!r}, which is no token of its own"
            raise invalid("model.path", str(tokenizer.folder), why)
        self.stop_ids = tuple(sorted(ends))
        marks = ("<tool_call>", "</tool_call>", "<think>", "</think>")
        self._marks = [ABSENT if (one := tokenizer.id_of(mark)) is None else one for mark in marks]

    def first(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], most: int | None = None) -> list[int]:
        """``most``: as of `TaskTokenizer.encode`."""
        return self._tokenizer.encode(self.template.render(messages, tools), most)

    def keeps(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], thinking: Sequence[int]) -> list[int]:
        """Return the numbers out of ``thinking`` whose messages still show their thinking in the template."""
        marks = {number: f"{DUMMY}n{number}n" for number in thinking}
        marked = [
            {**one, "reasoning_content": marks[number]} if number in marks else one
            for number, one in enumerate(messages)
        ]
        text = self.template.render(marked, tools)
        return [number for number, mark in marks.items() if mark in text]

    def parse(self, tail: list[int], sampled: list[int], tools: Sequence[dict[str, Any]]) -> Reply:
        library, stops = self._library_tokenizer, set(self.stop_ids)
        start, end, think, think_end = self._marks
        marks = {"stop_ids": stops, "tool_call_id": start, "tool_call_end_id": end}
        thinks = self._tokenizer.decode(tail[-OPENING:]).rstrip().endswith("<think>")
        try:
            if not tools or self.calls == "json":
                found = parse_qwen3(library, sampled, **marks, reasoning_end_id=think_end, prefilled_thinking=thinks)
            elif self.calls == "bare json":
                found = parse_llama_3(library, sampled, stop_ids=stops)
            else:
                thought = {"think_id": think, "think_end_id": think_end, "prefilled_thinking": thinks}
                found = parse_qwen35(library, sampled, **marks, **thought, tools=list(tools))
        except (ValueError, RecursionError):  # a number without end, or brackets: JSON that Python does not read
            raw = self._tokenizer.decode([one for one in sampled if one not in stops])
            return Reply("", calls=(ToolCall("", {}, raw, ERRORS["invalid_json"]),))
        return reply_of(found)

    def stopped(self, sampled: list[int], strings: Sequence[str]) -> tuple[int, list[int], str]:
        """Tokens of a turn up to the one that completes a stop string; those of the text before it; the string.

        Without one the whole turn, twice, and an empty text; a stop token is no text. Of a token that the string splits
        the text has a part.
        """
        decode, own = self._tokenizer.decode, [one for one in sampled if one not in self.stop_ids]
        kept = bisect_left(range(len(own)), True, key=lambda n: any(one in decode(own[:n]) for one in strings))
        text = decode(own[:kept])
        start, string = min(((text.index(one), one) for one in strings if one in text), default=(0, ""))
        return (kept, self._tokenizer.encode(text[:start]), string) if string else (len(sampled), sampled, "")

    def delta(
        self,
        tail: list[int],
        sampled: list[int],
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]],
        *,
        most: int | None = None,
    ) -> list[int]:
        text = self.delta_text([{"role": "user", "content": "x"}], messages, tools)
        ended = sampled[-1:] and sampled[-1] in self.stop_ids
        return self._tokenizer.encode(text if ended else self._end + text, most)

    def delta_text(
        self, before: Sequence[Message], messages: Sequence[Message], tools: Sequence[dict[str, Any]]
    ) -> str:
        """What the template writes after the end of a dummy turn that follows ``before``."""
        text = self.template.render([*before, dummy_turn(messages), *messages], tools)
        _, found, after = text.partition(DUMMY)
        _, ended, delta = after.partition(self._end)
        if not found or not ended:
            raise BridgeError(
                f"the chat template does not write a turn of the assistant before {messages[0]['role']!r}"
            )
        return delta


class LibraryTokenizer:
    """The policy's tokenizer, as `renderers` calls it."""

    unk_token_id = None

    def __init__(self, tokenizer: TaskTokenizer) -> None:
        self._tokenizer = tokenizer
        self.name_or_path = str(tokenizer.folder)
        self.eos_token_id = tokenizer.eos_id
        # The parsers encode the start of a turn alone, and that for each turn.
        self._encode = lru_cache(maxsize=8)(tokenizer.encode)
        self.all_special_ids = [one for one, special in tokenizer.added_ids.items() if special]

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return list(self._encode(text))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        special = set(self.all_special_ids) if skip_special_tokens else set()
        return self._tokenizer.decode([one for one in ids if one not in special])

    def convert_tokens_to_ids(self, token: str) -> int | None:
        return self._tokenizer.id_of(token)


def dummy_turn(answers: Sequence[Message]) -> Message:
    """A turn of the assistant that ``answers`` may follow: one that calls a tool, if they are a tool's."""
    if answers[0]["role"] != "tool":
        return {"role": "assistant", "content": DUMMY}
    call = message_call(answers[0].get("tool_call_id", DUMMY_ID), answers[0].get("name", "tool"), {"x": DUMMY})
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def message_call(identity: str, name: str, arguments: Any) -> dict[str, Any]:
    """A tool call of a message, in OpenAI's form."""
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}


def reply_of(found: ParsedResponse) -> Reply:
    before, ended, after = found.content.rpartition("</think>")
    thinking = found.reasoning_content or before.replace("<think>", "", 1).strip()
    return Reply(after.strip() if ended else found.content, thinking, tuple(map(_call, found.tool_calls)))


def _call(found: ParsedToolCall) -> ToolCall:
    name, arguments, status = found.name or "", found.arguments, str(found.status)
    error = "" if status in {"ok", "unknown_tool"} else ERRORS.get(status, "the tool call is malformed")
    if isinstance(arguments, str) and not error:
        try:
            arguments = json.loads(arguments)
        except ValueError:
            error = ERRORS["invalid_json"]
    if not isinstance(name, str):
        name, error = "", ERRORS["missing_name"]
    return ToolCall(name, arguments, found.raw, error)
