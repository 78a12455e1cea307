"""Scripted conversations through all three APIs: a context is what was sampled plus what was added, token for token."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from libra_hpc.chat.selftest import choose_dialect
from libra_hpc.endpoint import anthropic_messages, chat_completions, responses
from libra_hpc.endpoint.agent_request import AgentRequest, Answer
from libra_hpc.endpoint.conversation import Conversation
from libra_hpc.tasks.tokenizer import TaskTokenizer
from tests.chat.chat_folder import write_chat_folder

from .agents import LOOK, PARAMETERS
from .played import call

TURNS = 6
ODD = "Zürich 北京 🚆 <x> {y}\n\n \t'q' \"p\""


class Completions:
    """How a program of each API keeps its history; ``ask`` gives the next body."""

    def __init__(self) -> None:
        self.items: list[Any] = []

    def user(self, text: str) -> None:
        self.items.append({"role": "user", "content": text})

    def ask(self, tools: bool) -> AgentRequest:
        named: list[Any] = [{"type": "function", "function": LOOK}] if tools else []
        return chat_completions.read({"messages": self._sent(), "tools": named})

    def _sent(self) -> Any:
        return json.loads(json.dumps(self.items))

    def take(self, asked: AgentRequest, answer: Answer) -> list[tuple[str, str]]:
        """Keep an answer, and return ids and arguments of its calls."""
        made = chat_completions.answer(asked, answer)["choices"][0]["message"]
        self.items.append({key: made[key] for key in ("role", "content", "tool_calls") if made.get(key)})
        return [(one["id"], one["function"]["arguments"]) for one in made.get("tool_calls", ())]

    def result(self, identity: str, text: str) -> None:
        self.items.append({"role": "tool", "tool_call_id": identity, "content": text})


class Responses(Completions):
    def ask(self, tools: bool) -> AgentRequest:
        return responses.read({"input": self._sent(), "tools": [{"type": "function", **LOOK}] if tools else []})

    def take(self, asked: AgentRequest, answer: Answer) -> list[tuple[str, str]]:
        made = responses.answer(asked, answer)["output"]
        self.items += made
        return [(one["call_id"], one["arguments"]) for one in made if one["type"] == "function_call"]

    def result(self, identity: str, text: str) -> None:
        self.items.append({"type": "function_call_output", "call_id": identity, "output": text})


class Messages(Completions):
    def ask(self, tools: bool) -> AgentRequest:
        own = {"name": "look", "description": LOOK["description"], "input_schema": PARAMETERS}
        return anthropic_messages.read({"messages": self._sent(), "tools": [own] if tools else []})

    def take(self, asked: AgentRequest, answer: Answer) -> list[tuple[str, str]]:
        made = anthropic_messages.answer(asked, answer)["content"]
        self.items.append({"role": "assistant", "content": made})
        return [(one["id"], json.dumps(one["input"])) for one in made if one["type"] == "tool_use"]

    def result(self, identity: str, text: str) -> None:
        block = {"type": "tool_result", "tool_use_id": identity, "content": text}
        if self.items[-1]["role"] == "user":
            self.items[-1]["content"].append(block)
        else:
            self.items.append({"role": "user", "content": [block]})


def said(draw: random.Random) -> str:
    """A turn of the policy: text, one call or two, thinking, a call that cannot be read."""
    return draw.choice(
        [
            f"I see {ODD}",
            call("look", thing=ODD),
            f"Both: {call('look', thing='a')}\n{call('look', thing='b', times=2)}",
            f"<think>\nhm\n</think>\n\n{draw.choice(['yes', call('look')])}",
            "<tool_call>\n{broken\n</tool_call>",
            "",
        ]
    )


class Walk:
    """One conversation: contexts as a run would have them, and how many samples there must be."""

    def __init__(self, tokenizer: TaskTokenizer, dialect: Any, seed: int) -> None:
        self.draw, self.tokenizer, self.stop = random.Random(seed), tokenizer, dialect.stop_ids[-1]
        self.conversation = Conversation(dialect)
        self.contexts: list[list[int]] = []
        self.turns = 0

    def turn(self, program: Completions, tools: bool) -> list[tuple[str, str]]:
        asked = program.ask(tools)
        placed = self.conversation.place(asked, 1 << 20)
        if placed.new_sample:
            self.contexts.append([])
        self.contexts[-1] += placed.tokens
        sampled = [*self.tokenizer.encode(said(self.draw)), self.stop]
        cut = self.draw.random() < 0.1
        sampled = sampled[:3] if cut else sampled
        self.turns += 1
        answer = self.conversation.said(list(sampled), cut, str(self.turns))
        assert answer.prompt_tokens == len(self.contexts[-1]), "the context is what a run has"
        self.contexts[-1] += sampled
        return program.take(asked, answer)

    def answered(self, program: Completions, calls: list[tuple[str, str]]) -> None:
        for identity, arguments in calls:
            program.result(identity, f"{arguments} {ODD}")
        if not calls:
            program.user(self.draw.choice(["go on", ODD]))


@pytest.mark.parametrize("conversations", [100, pytest.param(3_400, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("kind", [Completions, Responses, Messages])
def test_a_conversation_is_one_sample_unless_a_cause_is_counted(
    tmp_path: Path, kind: type[Completions], conversations: int
) -> None:
    tokenizer = TaskTokenizer(write_chat_folder(tmp_path))
    dialect = choose_dialect(tokenizer, with_tools=True).dialect
    seen: set[str] = set()
    for seed in range(conversations):
        walk, program = Walk(tokenizer, dialect, seed), kind()
        program.user(ODD)
        causes: dict[str, int] = {}
        for _ in range(TURNS):
            calls = walk.turn(program, tools=True)
            walk.answered(program, calls)
            event = walk.draw.random()
            if event < 0.1:
                aside = kind()
                aside.user("sub-agent")
                walk.turn(aside, tools=False)
                causes["tools"] = causes.get("tools", 0) + 1
                walk.answered(program, walk.turn(program, tools=True))
                causes["returned"] = causes.get("returned", 0) + 1
            elif event < 0.15:
                program.items[0]["content"] += "?"
                causes["rewritten"] = causes.get("rewritten", 0) + 1
                walk.answered(program, walk.turn(program, tools=True))
        assert walk.conversation.causes == causes, f"seed {seed}"
        assert walk.conversation.samples == len(walk.contexts) == 1 + sum(causes.values())
        seen |= causes.keys()
    assert seen == {"tools", "returned", "rewritten"}
