"""Agents of the tests: the SDKs of OpenAI and Anthropic in their own words, each four turns with a tool."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from openai import APIError, APIStatusError, AsyncOpenAI, BadRequestError, OpenAI

from libra_hpc.errors import OperationError
from libra_hpc.tasks.base import EnvironmentFailed

if TYPE_CHECKING:
    from anthropic import AsyncAnthropic

PARAMETERS = {"type": "object", "properties": {"thing": {"type": "string"}}}
LOOK = {"name": "look", "description": "Look at a thing.", "parameters": PARAMETERS}
TOOLS: Any = [{"type": "function", "function": LOOK}]
TURNS = 4


def by_openai(work: Callable[[Any, AsyncOpenAI], Awaitable[None]]) -> Any:
    """The coroutine of an agent that works with OpenAI's SDK."""

    async def run(row: Any, endpoint: Any, box: Any) -> None:
        async with AsyncOpenAI(base_url=endpoint.url, api_key=endpoint.key, max_retries=0) as client:
            await work(row, client)

    return run


def seen(arguments: str) -> str:
    return f"a {json.loads(arguments)['thing']}"


async def _completions(row: Any, client: AsyncOpenAI, stream: bool = False) -> None:
    messages = [{"role": "user", "content": row["prompt"]}]
    for _ in range(TURNS):
        asked: Any = {"model": "policy", "messages": messages, "tools": TOOLS}
        if stream:
            async with client.chat.completions.stream(**asked, stream_options={"include_usage": True}) as events:
                made = (final := await events.get_final_completion()).choices[0].message
            assert final.usage, "it was asked for"
        else:
            made = (await client.chat.completions.create(**asked)).choices[0].message
        messages.append(made.model_dump(exclude_none=True, include={"role", "content", "tool_calls"}))
        calls: Any = made.tool_calls or []
        messages += [{"role": "tool", "tool_call_id": c.id, "content": seen(c.function.arguments)} for c in calls]
        messages += [] if calls else [{"role": "user", "content": "go on"}]


completions = by_openai(_completions)
completions_streamed = by_openai(partial(_completions, stream=True))


@by_openai
async def responses(row: Any, client: AsyncOpenAI) -> None:
    items: list[Any] = [{"role": "user", "content": row["prompt"]}]
    for turn in range(TURNS):
        asked: Any = {"model": "policy", "input": items, "tools": [{"type": "function", **LOOK}]}
        if turn % 2:
            async with client.responses.stream(**asked) as events:
                made = await events.get_final_response()
        else:
            made = await client.responses.create(**asked)
        items += [one.model_dump(exclude_none=True) for one in made.output]
        calls: Any = [one for one in made.output if one.type == "function_call"]
        items += [{"type": "function_call_output", "call_id": c.call_id, "output": seen(c.arguments)} for c in calls]
        items += [] if calls else [{"role": "user", "content": "go on"}]


async def anthropic(row: Any, endpoint: Any, box: Any) -> None:
    # It takes as long to import as torch, and every worker collects.
    from anthropic import AsyncAnthropic

    async with AsyncAnthropic(base_url=endpoint.url.removesuffix("/v1"), api_key=endpoint.key) as client:
        await _anthropic(row, client)


async def _anthropic(row: Any, client: AsyncAnthropic) -> None:
    messages: list[Any] = [{"role": "user", "content": row["prompt"]}]
    tools: Any = [{"name": "look", "description": LOOK["description"], "input_schema": PARAMETERS}]
    for turn in range(TURNS):
        asked: Any = {"model": "policy", "max_tokens": 999, "messages": messages, "tools": tools}
        if turn % 2:
            async with client.messages.stream(**asked) as events:
                made = await events.get_final_message()
        else:
            made = await client.messages.create(**asked)
        messages.append({"role": "assistant", "content": [one.model_dump(exclude_none=True) for one in made.content]})
        results = [
            {"type": "tool_result", "tool_use_id": one.id, "content": f"a {one.input['thing']}"}
            for one in made.content
            if one.type == "tool_use"
        ]
        messages.append({"role": "user", "content": results or "go on"})


@by_openai
async def stopping(row: Any, client: AsyncOpenAI) -> None:
    """Turns that end at a string, the last one in a conversation that is another program's."""
    messages: list[Any] = [{"role": "user", "content": row["prompt"]}]
    for stop in ("</code>", ["Observation:", "he"]):
        made = await client.chat.completions.create(model="policy", messages=messages, stop=stop)
        assert made.choices[0].finish_reason == "stop"
        messages += [made.choices[0].message, {"role": "user", "content": f"go on, not {stop}"}]
    assert [one.content for one in messages[1::2]] == ["<code>\nx = 1", "So t"]
    await client.chat.completions.create(model="policy", messages=messages)


async def refused(row: Any, endpoint: Any, box: Any) -> None:
    """A client that is refused a form, one whose thread becomes whole histories, and a count of tokens."""
    from anthropic import AsyncAnthropic, beta_async_tool

    @beta_async_tool
    async def look(thing: str) -> str:
        return f"a {thing}"

    asked: Any = {"model": "policy", "max_tokens": 99, "messages": [{"role": "user", "content": row["prompt"]}]}
    async with AsyncAnthropic(base_url=endpoint.url.removesuffix("/v1"), api_key=endpoint.key) as client:
        async for made in client.beta.messages.tool_runner(**asked, tools=[look]):
            assert made.usage.input_tokens > 0
        counted = await client.messages.count_tokens(model="policy", messages=asked["messages"])
        made = await client.messages.create(**asked, stop_sequences=["s."])
        assert (counted.input_tokens, made.content[0].text) == (made.usage.input_tokens, "Ye")
        assert (made.stop_reason, made.stop_sequence) == ("stop_sequence", "s.")
    async with AsyncOpenAI(base_url=endpoint.url, api_key=endpoint.key) as policy:
        with contextlib.suppress(BadRequestError):
            await policy.responses.create(model="policy", input="x", text={"format": {"type": "json_object"}})


@by_openai
async def forgetful(row: Any, client: AsyncOpenAI) -> None:
    """A sub-agent with other tools, the caller again, a history that is cut, and then what has no room."""

    async def say(messages: Any, tools: Any = TOOLS) -> Any:
        made = await client.chat.completions.create(model="policy", messages=messages, tools=tools, max_tokens=40)
        return made.choices[0].message.model_dump(exclude_none=True)

    main = [{"role": "user", "content": row["prompt"]}]
    main += [await say(main), {"role": "user", "content": "and then?"}]
    await say([{"role": "user", "content": "sub-agent"}], tools=[])
    main += [await say(main), {"role": "user", "content": "go on"}]
    await say([main[0], {"role": "user", "content": "the story so far: none"}])
    with pytest.raises(BadRequestError) as full:
        await say([{"role": "user", "content": "long " * 5000}])
    assert full.value.code == "context_length_exceeded"
    await say([*main, {"role": "assistant", "content": "mine"}, {"role": "user", "content": "last"}])


@by_openai
async def stubborn(row: Any, client: AsyncOpenAI) -> None:
    """Five equal requests at once, retries of them, and requests whose clients go away and come again."""
    asked: Any = {"model": "policy", "messages": [{"role": "user", "content": row["prompt"]}]}
    five = await asyncio.gather(*(client.chat.completions.create(**asked) for _ in range(5)))
    assert len({one.id for one in five}) == 5
    again: Any = {**asked, "extra_headers": {"x-stainless-retry-count": "1"}}
    assert (await client.chat.completions.create(**again)).id == five[-1].id
    named: Any = {**asked, "extra_headers": {"Idempotency-Key": "a"}}
    one, two = await asyncio.gather(*(client.chat.completions.create(**named) for _ in range(2)))
    assert one.id == two.id
    gone = asyncio.create_task(client.responses.create(model="policy", input="x"))
    await asyncio.sleep(0.05)
    gone.cancel()
    await asyncio.sleep(0.3)
    back: Any = await client.responses.create(model="policy", input="x")
    assert back.output[0].content[0].text == "turn 7"
    assert (await client.chat.completions.create(**asked)).id != one.id, "an equal request later is a turn of its own"


@by_openai
async def leaving(row: Any, client: AsyncOpenAI) -> None:
    """Requests whose clients leave, all at once and one by one, between two that are read."""

    def ask(content: str) -> asyncio.Task[Any]:
        asked: Any = [{"role": "user", "content": content}]
        return asyncio.create_task(client.chat.completions.create(model="policy", messages=asked))

    await ask("read")
    for count in (row["clients"], 1, 1):
        gone = [ask(f"left {n}") for n in range(count)]
        await asyncio.sleep(0.5)
        for one in gone:
            one.cancel()
        await asyncio.gather(*gone, return_exceptions=True)
    await ask("read, too")


@by_openai
async def talkative(row: Any, client: AsyncOpenAI) -> None:
    asked: Any = {"model": "policy", "messages": [{"role": "user", "content": "word " * row["words"]}]}
    with pytest.raises(BadRequestError, match="tokens or more; the context has 4096"):
        await client.chat.completions.create(**asked)
    await client.responses.create(model="policy", input="x")


async def outlived(row: Any, endpoint: Any, box: Any) -> None:
    """Its thread goes on asking when it has ended."""

    loop, answered = asyncio.get_running_loop(), asyncio.Event()

    def ask() -> None:
        with OpenAI(base_url=endpoint.url, api_key=endpoint.key, max_retries=0) as client:
            for _ in range(9):
                try:
                    client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "x"}])
                    loop.call_soon_threadsafe(answered.set)
                except APIStatusError as error:
                    Path(row["said"]).write_text(f"{error.status_code} {error.message}")
                    return

    thread = asyncio.create_task(asyncio.to_thread(ask))
    await answered.wait()
    await asyncio.sleep(0.3)
    thread.cancel()


async def synchronous(row: Any, endpoint: Any, box: Any) -> None:
    with OpenAI(base_url=endpoint.url, api_key=endpoint.key) as client:
        client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "x"}])


@by_openai
async def failing(row: Any, client: AsyncOpenAI) -> None:
    await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "x"}])
    raise KeyError("lost")


@by_openai
async def away(row: Any, client: AsyncOpenAI) -> None:
    raise EnvironmentFailed("the shop is away")


@by_openai
async def slow(row: Any, client: AsyncOpenAI) -> None:
    await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "x"}])
    await asyncio.sleep(60)


async def lingering(row: Any, endpoint: Any, box: Any) -> None:
    """A task and its thread that go on when it has ended: they ask, and write what its judge reads."""
    client = OpenAI(base_url=endpoint.url, api_key=endpoint.key, max_retries=0)
    await asyncio.to_thread(client.responses.create, model="policy", input="x")

    async def goes_on() -> None:
        await asyncio.sleep(0.1)
        with contextlib.suppress(APIError):
            await asyncio.to_thread(client.responses.create, model="policy", input="more")
        with contextlib.suppress(OperationError):
            await box.write("answer.txt", "42")

    row["task"] = asyncio.create_task(goes_on())


async def late(row: Any, box: Any) -> float:
    await row["task"]
    return float(await box.read("answer.txt") == b"42")


async def one(row: Any, box: Any) -> dict[str, float]:
    return {"reward": 1.0}


async def answer_file(row: Any, box: Any) -> dict[str, float]:
    """What the agent's program left, and what ``tests`` say, which the agent could not see."""
    left = (await box.run("cat answer.txt; ls /tests", mount={"/tests": row["tests"]})).output
    return {"reward": float("42" in left and "hidden" in left)}


async def found_a_key(row: Any, box: Any) -> float:
    return float(await box.read("answer.txt") == b"It is a key.")
