"""Scripted conversations through all three APIs: a context is what was sampled plus what was added, token for token."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession

from libra_hpc.chat.selftest import choose_dialect
from libra_hpc.endpoint import chat_completions
from libra_hpc.endpoint.agent_endpoint import APIS, RETRY, AgentEndpoint, Asked
from libra_hpc.endpoint.agent_request import AgentRequest, Answer, Histories, identity
from libra_hpc.endpoint.conversation import Conversation, GrowingSample
from libra_hpc.tasks.tokenizer import TaskTokenizer
from tests.chat.chat_folder import write_chat_folder

from .agents import LOOK, PARAMETERS
from .played import call

TURNS = 6
ODD = "Zürich 北京 🚆 <x> {y}\n\n \t'q' \"p\""


class Completions:
    """How a program of each API keeps its history."""

    path = "/v1/chat/completions"

    def __init__(self) -> None:
        self.items: list[Any] = []

    def user(self, text: str) -> None:
        self.items.append({"role": "user", "content": text})

    def body(self, tools: bool) -> dict[str, Any]:
        named: list[Any] = [{"type": "function", "function": LOOK}] if tools else []
        return {"messages": self.items, "tools": named}

    def take(self, answer: dict[str, Any]) -> list[tuple[str, str]]:
        """Keep an answer, and return ids and arguments of its calls."""
        made = answer["choices"][0]["message"]
        self.items.append({key: made[key] for key in ("role", "content", "tool_calls") if made.get(key)})
        return [(one["id"], one["function"]["arguments"]) for one in made.get("tool_calls", ())]

    def result(self, identity: str, text: str) -> None:
        self.items.append({"role": "tool", "tool_call_id": identity, "content": text})


class Responses(Completions):
    path = "/v1/responses"

    def body(self, tools: bool) -> dict[str, Any]:
        return {"input": self.items, "tools": [{"type": "function", **LOOK}] if tools else []}

    def take(self, answer: dict[str, Any]) -> list[tuple[str, str]]:
        self.items += answer["output"]
        return [(one["call_id"], one["arguments"]) for one in answer["output"] if one["type"] == "function_call"]

    def result(self, identity: str, text: str) -> None:
        self.items.append({"type": "function_call_output", "call_id": identity, "output": text})


class Messages(Completions):
    path = "/v1/messages"

    def body(self, tools: bool) -> dict[str, Any]:
        own = {"name": "look", "description": LOOK["description"], "input_schema": PARAMETERS}
        return {"messages": self.items, "tools": [own] if tools else []}

    def take(self, answer: dict[str, Any]) -> list[tuple[str, str]]:
        self.items.append({"role": "assistant", "content": answer["content"]})
        return [(one["id"], json.dumps(one["input"])) for one in answer["content"] if one["type"] == "tool_use"]

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
        self.contexts: dict[GrowingSample, list[int]] = {}
        self.turns = 0
        self.begun = asyncio.Event()

    def ask(self, asked: Asked) -> None:
        self.asked = asked.request
        self.begun.set()
        self.asking = asyncio.create_task(self.answered_by(asked))

    async def answered_by(self, asked: Asked) -> None:
        answer = await self.taken(asked.request)
        if not asked.answer.done():
            asked.answer.set_result(answer)

    async def taken(self, asked: AgentRequest) -> Answer:
        placed = self.conversation.place(asked, 1 << 20)
        assert placed.new_sample == (placed.sample not in self.contexts)
        context = self.contexts.setdefault(placed.sample, [])
        context += placed.tokens
        sampled = [*self.tokenizer.encode(said(self.draw)), self.stop]
        cut = self.draw.random() < 0.1
        sampled = sampled[:3] if cut else sampled
        for _ in range(self.draw.randrange(4)):
            await asyncio.sleep(0)
        self.turns += 1
        answer = self.conversation.said(placed.sample, list(sampled), cut, str(self.turns))
        assert answer.prompt_tokens == len(context), "the context is what a run has"
        context += sampled
        return answer

    async def turn(self, program: Completions, tools: bool, post: Any) -> list[tuple[str, str]]:
        """One request; clients go away and come again, and send it twice at once, or again afterwards."""
        body, before, event = program.body(tools), self.turns, self.draw.random()
        self.begun.clear()
        asking = asyncio.create_task(post(program.path, body))
        if event < 0.2:
            await self.begun.wait()
            if event < 0.1:
                asking.cancel()
            found = await post(program.path, body, retry=1)
        else:
            found = await asking
        if 0.1 <= event < 0.3:
            assert await asking == found == await post(program.path, body, retry=1)
        assert self.turns == before + 1
        assert self.asked == APIS[program.path].read(body, Histories()), "what was read before is as if read again"
        return program.take(found)

    def answered(self, program: Completions, calls: list[tuple[str, str]]) -> None:
        for call_id, arguments in calls:
            program.result(call_id, f"{arguments} {ODD}")
        if not calls:
            program.user(self.draw.choice(["go on", ODD]))


@pytest.mark.parametrize(
    "conversations", [20, pytest.param(3_400, marks=[pytest.mark.nightly, pytest.mark.timeout(3600)])]
)
@pytest.mark.parametrize("kind", [Completions, Responses, Messages])
async def test_a_conversation_is_one_sample_unless_a_cause_is_counted(
    tmp_path: Path, kind: type[Completions], conversations: int, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = TaskTokenizer(write_chat_folder(tmp_path))
    dialect = choose_dialect(tokenizer, with_tools=True).dialect
    endpoint, seen = AgentEndpoint(), set[str]()
    await endpoint.start()
    async with ClientSession(endpoint.url) as session:
        for seed in range(conversations):
            seen |= (await walked(Walk(tokenizer, dialect, seed), kind, endpoint, session)).keys()
    await endpoint.stop()
    assert seen == {"tools", "rewritten"}
    assert not [one for one in caplog.records if one.levelname == "ERROR"], "a client that goes is no error"


async def walked(
    walk: Walk, kind: type[Completions], endpoint: AgentEndpoint, session: ClientSession
) -> dict[str, int]:
    """Play one conversation; returns the causes that it must have, and has."""

    async def post(path: str, body: Any, retry: int = 0) -> Any:
        async with session.post(
            path, json=body, headers={"x-api-key": "key", RETRY: str(retry)}, expect100=bool(retry)
        ) as made:
            assert made.status == 200, await made.text()
            found = await made.json()
            return {key: value for key, value in found.items() if key not in ("created", "created_at")}

    program, causes = kind(), dict[str, int]()
    endpoint.open("key", walk.ask, lambda waits: None)
    program.user(ODD)
    for _ in range(TURNS):
        walk.answered(program, await walk.turn(program, True, post))
        event = walk.draw.random()
        if event < 0.1:
            aside = kind()
            aside.user("sub-agent")
            await walk.turn(aside, False, post)
            causes["tools"] = causes.get("tools", 0) + 1
            walk.answered(program, await walk.turn(program, True, post))
        elif event < 0.15:
            program.items[0]["content"] += "?"
            causes["rewritten"] = causes.get("rewritten", 0) + 1
            walk.answered(program, await walk.turn(program, True, post))
    endpoint.close("key")
    assert walk.conversation.causes == causes
    assert walk.conversation.samples == len(walk.contexts) == 1 + sum(causes.values())
    return causes


def test_of_a_history_that_goes_on_the_new_items_are_read() -> None:
    """In each of two conversations by turns; one item may end a message that an earlier one began."""
    before, read = Histories(), list[str]()

    def add(messages: list[Any], field: str, item: dict[str, Any]) -> None:
        read.append(field)
        own = {"role": "assistant", "content": item["text"]}
        if item.get("goes_on"):
            own["content"] = messages.pop()["content"] + own["content"]
        messages.append(own)

    def texts(*items: dict[str, Any]) -> tuple[list[str], int]:
        read.clear()
        messages, keys = before.read("x", list(items), add)
        assert keys == [identity(messages, number) for number in range(len(messages))]
        return [one["content"] for one in messages], len(read)

    a, b, c, more = {"text": "a"}, {"text": "b"}, {"text": "c"}, {"text": "+", "goes_on": True}
    assert texts(a, b) == (["a", "b"], 2)
    assert texts(c, b) == (["c", "b"], 2)
    assert texts(a, b, more) == (["a", "b+"], 1)
    assert texts(c, b, a) == (["c", "b", "a"], 1)
    assert texts(a, b, c) == (["a", "b", "c"], 2), "b may not end as it did before"
    assert texts(a, b, more, more) == (["a", "b++"], 1)


def test_a_history_that_javascript_wrote_goes_on(tmp_path: Path) -> None:
    """It has one kind of number, and cuts text within a surrogate pair."""
    tokenizer = TaskTokenizer(write_chat_folder(tmp_path))
    dialect = choose_dialect(tokenizer, with_tools=True).dialect
    conversation, program, before = Conversation(dialect), Completions(), Histories()
    program.user("half a \ud83d")
    first = conversation.place(chat_completions.read(program.body(tools=True), before), 1 << 20)
    sampled = [*tokenizer.encode(call("look", times=2.0, at=[True, None])), dialect.stop_ids[-1]]
    made = conversation.said(first.sample, sampled, False, "1").message
    assert made["tool_calls"][0]["function"]["arguments"]["times"] == 2.0
    made["tool_calls"][0]["function"]["arguments"] = '{"at": [true, null], "times": 2}'
    program.items.append(made)
    program.result(made["tool_calls"][0]["id"], "half a \ud83d")
    placed = conversation.place(chat_completions.read(program.body(tools=True), before), 1 << 20)
    assert not placed.new_sample
    assert "half a ?" in tokenizer.decode(placed.tokens)
