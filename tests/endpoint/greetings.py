"""A taskset of verifiers with a harness of its own, which asks the policy twice; its environment alone imports it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf
from openai import AsyncOpenAI
from verifiers.v1.runtimes import ProgramResult

__all__ = ["Greetings", "Twice"]


class Greeting(vf.Task[vf.TaskData]):
    @vf.reward(weight=0.5)
    async def answered(self, trace: Any) -> float:
        return float(bool(trace.last_reply))

    @vf.metric
    async def replies(self, trace: Any) -> float:
        return float(trace.num_turns)


class Greetings(vf.Taskset[Greeting]):
    def load(self) -> Iterator[Greeting]:
        for name in ("Ann", "Bob", "Eve", "Max"):
            yield Greeting(vf.TaskData(prompt=f"Say hello to {name}."), self.config.task)


class Twice(vf.Harness):
    """Needs no process of its own. The task of Eve ends with an error of the program."""

    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any
    ) -> ProgramResult:
        async with AsyncOpenAI(base_url=endpoint, api_key=secret) as client:
            messages: list[Any] = [{"role": "user", "content": data.prompt}]
            for _ in range(2):
                made = await client.chat.completions.create(model=ctx.model, messages=messages, max_tokens=16)
                messages += [made.choices[0].message, {"role": "user", "content": "Once more."}]
        return ProgramResult(exit_code=int("Eve" in data.prompt), stdout="", stderr="no such program")
