"""Programs of public agent libraries, as their pages show them: ``programs.py NAME PROMPT`` in its environment.

Each asks the policy about a prompt, looks at things with one tool, and prints its answer. None knows the endpoint.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

URL, KEY = os.environ.get("OPENAI_BASE_URL", ""), os.environ.get("OPENAI_API_KEY", "")
PARAMETERS = {"type": "object", "properties": {"thing": {"type": "string"}}, "required": ["thing"]}


def look(thing: str) -> str:
    """Look at a thing.

    Args:
        thing: What to look at.
    """
    return f"a {thing}"


def completions(prompt: str, ask: Callable[..., Any]) -> str:
    """The loop that everybody writes; ``ask`` gets messages and tools, and returns a message."""
    messages: list[Any] = [{"role": "user", "content": prompt}]
    while True:
        said = ask(
            messages=messages, tools=[{"type": "function", "function": {"name": "look", "parameters": PARAMETERS}}]
        )
        messages.append(said)
        for call in said.tool_calls or []:
            content = look(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
        if not said.tool_calls:
            return str(said.content)


def openai_agents(prompt: str) -> str:
    from agents import Agent, Runner, function_tool, set_tracing_disabled

    set_tracing_disabled(True)
    agent: Any = Agent(name="seer", instructions="Look at things.", model="policy", tools=[function_tool(look)])
    return str(Runner.run_sync(agent, prompt).final_output)


def langgraph(prompt: str) -> str:
    from langchain.agents import create_agent
    from langchain_openai import ChatOpenAI

    agent: Any = create_agent(ChatOpenAI(model="policy"), tools=[look])
    return str(agent.invoke({"messages": [("user", prompt)]})["messages"][-1].content)


def smolagents(prompt: str, code: bool = False) -> str:
    from smolagents import CodeAgent, OpenAIServerModel, ToolCallingAgent, tool

    model, kind = OpenAIServerModel("policy", api_base=URL, api_key=KEY), CodeAgent if code else ToolCallingAgent
    return str(kind(tools=[tool(look)], model=model, verbosity_level=0).run(prompt))


def smolagents_code(prompt: str) -> str:
    return smolagents(prompt, code=True)


def litellm(prompt: str) -> str:
    from litellm import completion

    return completions(prompt, lambda **asked: completion("openai/policy", **asked).choices[0].message)


def mini_swe_agent(prompt: str) -> str:
    """Its own program, which writes the answer by the policy's commands."""
    environment = {**os.environ, "MSWEA_CONFIGURED": "true", "MSWEA_COST_TRACKING": "ignore_errors"}
    flags = ["-m", "openai/policy", "--task", prompt, "--yolo", "--exit-immediately", "-l", "0"]
    os.execve(f"{sys.prefix}/bin/mini", ["mini", *flags], environment)


def dspy(prompt: str) -> str:
    import dspy as library

    library.configure(lm=library.LM("openai/policy", api_base=URL, cache=False))
    return str(library.ReAct("question -> answer", tools=[look])(question=prompt).answer)


if __name__ == "__main__":
    program: Callable[[str], str] = globals()[sys.argv[1]]
    Path("answer.txt").write_text(program(sys.argv[2]).strip())
