"""Agents whose samples grow side by side, without an SDK."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

from aiohttp import ClientSession

LOOK: Any = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


class Client:
    """A program's requests, as they go over the wire."""

    def __init__(self, session: ClientSession, endpoint: Any) -> None:
        self._session, self._url = session, f"{endpoint.url}/chat/completions"
        self._headers = {"Authorization": f"Bearer {endpoint.key}"}

    async def ask(self, messages: list[Any], **fields: Any) -> dict[str, Any]:
        body = {"model": "policy", "messages": messages, **fields}
        async with self._session.post(self._url, json=body, headers=self._headers) as answer:
            assert answer.status == 200, await answer.text()
            return (await answer.json())["choices"][0]["message"]


async def at_once(row: Any, endpoint: Any, box: Any) -> None:
    async with ClientSession() as session:
        client = Client(session, endpoint)
        await asyncio.gather(*(client.ask([user(f"part {n}")]) for n in range(row["requests"])))


async def interleaved(row: Any, endpoint: Any, box: Any) -> None:
    """Two sub-agents by turns: one renames calls and writes text and calls apart, one puts thinking back."""
    async with ClientSession() as session:
        client, histories = Client(session, endpoint), [[user("first")], [user("second")]]
        for turn in range(4):
            for number, messages in enumerate(histories):
                made = await client.ask(messages, tools=LOOK)
                (own,) = made["tool_calls"]
                calls = [{**own, "id": f"mine-{turn}"}]
                if number:
                    text = f"<think>\n{made['reasoning_content']}\n</think>\n\n{made['content']}"
                    messages.append({"role": "assistant", "content": text, "tool_calls": calls})
                else:
                    messages.append({"role": "assistant", "content": made["content"]})
                    messages.append({"role": "assistant", "content": None, "tool_calls": calls})
                messages.append({"role": "tool", "tool_call_id": f"mine-{turn}", "content": "seen"})


async def tree(row: Any, endpoint: Any, box: Any) -> None:
    """A random tree: sub-agents beside one another, and histories that part."""
    async with ClientSession() as session:
        client, read = Client(session, endpoint), list[str]()
        row["read"] = read

        async def grow(messages: list[Any], draw: random.Random, depth: int) -> str:
            for turn in range(draw.randrange(1, 4)):
                answer = (await client.ask(messages))["content"] or ""
                read.append(answer)
                messages = [*messages, {"role": "assistant", "content": answer}]
                children = range(draw.randrange(0, 4) if depth < 2 and draw.random() < 0.5 else 0)
                begin: list[Any] = messages if draw.random() < 0.3 else []
                parts = [
                    grow([*begin, user(f"sub {n // 2}")], random.Random(draw.random()), depth + 1) for n in children
                ]
                messages = [*messages, user(f"{turn}: {sorted(await asyncio.gather(*parts))}")]
            return answer

        await grow([user("root")], random.Random(row["seed"]), 0)


async def length(row: Any, box: Any) -> float:
    with Path(row["said"]).open("a") as file:
        file.write(json.dumps(sorted(row["read"])) + "\n")
    return float(len("".join(row["read"])) % 7)
