"""An agent that is a program: OpenAI's SDK in a loop with a shell, and the reward of what it left in its box.

[task]
agent = "examples/my_agent.py:run"
reward = "examples/my_agent.py:solved"
data = "examples/my_data.jsonl"
prompt = "problem"
"""

from __future__ import annotations

import json
from typing import Any

from openai import AsyncOpenAI

PARAMETERS = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
SHELL: Any = {
    "name": "shell",
    "description": "Run a command; write your answer to answer.txt.",
    "parameters": PARAMETERS,
}
TURNS = 8


async def run(row: Any, endpoint: Any, box: Any) -> None:
    """Work on one row until the policy calls no tool."""
    async with AsyncOpenAI(base_url=endpoint.url, api_key=endpoint.key) as client:
        messages: list[Any] = [{"role": "user", "content": row["problem"]}]
        for _ in range(TURNS):
            tools: Any = [{"type": "function", "function": SHELL}]
            answer = await client.chat.completions.create(model="policy", messages=messages, tools=tools)
            message: Any = answer.choices[0].message
            messages.append(message)
            for call in message.tool_calls or ():
                ran = await box.run(str(json.loads(call.function.arguments).get("command")), timeout_s=20)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": ran.output or "(no output)"})
            if not message.tool_calls:
                return


async def solved(row: Any, box: Any) -> float:
    """1.0 for the right answer; asked when nothing of the agent runs any more."""
    try:
        return float((await box.read("answer.txt")).decode().strip() == str(row["answer"]))
    except (OSError, UnicodeDecodeError):  # whatever the policy left there
        return 0.0
