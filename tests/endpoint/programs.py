"""Programs of public agent libraries, as their pages show them: ``programs.py NAME PROMPT`` in its environment.

Each asks the policy about a prompt, looks at things with one tool, and prints its answer. None knows the endpoint.
"""

from __future__ import annotations

import asyncio
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


def openai_chat(prompt: str, **more: Any) -> str:
    from openai import OpenAI

    create: Any = OpenAI().chat.completions.create
    return completions(prompt, lambda **asked: create(model="policy", **asked, **more).choices[0].message)


def openai_streamed(prompt: str) -> str:
    from openai import OpenAI

    def ask(**asked: Any) -> Any:
        usage: Any = {"include_usage": True}
        with OpenAI().chat.completions.stream(model="policy", stream_options=usage, **asked) as events:
            return events.get_final_completion().choices[0].message

    return completions(prompt, ask)


def openai_required(prompt: str) -> str:
    return openai_chat(prompt, temperature=0.2, seed=7, user="me", tool_choice="required")


def openai_responses(prompt: str) -> str:
    from openai import OpenAI

    client, items = OpenAI(), list[Any]([{"role": "user", "content": prompt}])
    tools: Any = [{"type": "function", "name": "look", "parameters": PARAMETERS, "strict": True}]
    while True:
        said = client.responses.create(model="policy", input=items, tools=tools)
        items += said.output
        calls = [one for one in said.output if one.type == "function_call"]
        for call in calls:
            content = look(**json.loads(call.arguments))
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": content})
        if not calls:
            return said.output_text


def anthropic_messages(prompt: str) -> str:
    from anthropic import Anthropic

    client, messages = Anthropic(), list[Any]([{"role": "user", "content": prompt}])
    tools: Any = [{"name": "look", "input_schema": PARAMETERS}]
    while True:
        with client.messages.stream(model="policy", max_tokens=200, messages=messages, tools=tools) as events:
            said: Any = events.get_final_message()
        messages.append({"role": "assistant", "content": said.content})
        calls = [one for one in said.content if one.type == "tool_use"]
        results = [{"type": "tool_result", "tool_use_id": one.id, "content": look(**one.input)} for one in calls]
        messages.append({"role": "user", "content": results})
        if not calls:
            return str(said.content[0].text)


def anthropic_runner(prompt: str) -> str:
    from anthropic import Anthropic, beta_tool

    asked: Any = {"model": "policy", "max_tokens": 200, "messages": [{"role": "user", "content": prompt}]}
    said: Any = Anthropic().beta.messages.tool_runner(**asked, tools=[beta_tool(look)]).until_done()
    return str(said.content[0].text)


def openai_agents(prompt: str, api: str = "responses", **more: Any) -> str:
    from agents import Agent, Runner, function_tool, set_default_openai_api, set_tracing_disabled

    set_tracing_disabled(True)
    set_default_openai_api(api)  # type: ignore[arg-type]
    tools = [] if more else [function_tool(look)]
    agent: Any = Agent(name="seer", instructions="Look at things.", model="policy", tools=tools, **more)
    return str(Runner.run_sync(agent, prompt).final_output)


def openai_agents_chat(prompt: str) -> str:
    return openai_agents(prompt, "chat_completions")


def mcp_tool(prompt: str) -> str:
    """The tool is an MCP server's, a process beside the agent."""
    from agents import Agent, Runner, set_tracing_disabled
    from agents.mcp import MCPServerStdio

    async def work() -> str:
        set_tracing_disabled(True)
        server: Any = {"command": sys.executable, "args": ["-P", __file__, "mcp_server", ""]}
        async with MCPServerStdio(params=server) as tools:
            return str((await Runner.run(Agent(name="seer", model="policy", mcp_servers=[tools]), prompt)).final_output)

    return asyncio.run(work())


def mcp_server(prompt: str) -> str:
    from mcp.server.mcpserver import MCPServer

    server = MCPServer("seer")
    server.tool()(look)
    server.run()
    return ""


def pydantic_ai(prompt: str, model: str = "openai-chat:policy", **more: Any) -> str:
    from pydantic_ai import Agent

    return str(Agent(model, tools=[look], **more).run_sync(prompt).output)


def pydantic_ai_responses(prompt: str) -> str:
    return pydantic_ai(prompt, "openai-responses:policy")


def pydantic_ai_anthropic(prompt: str) -> str:
    return pydantic_ai(prompt, "anthropic:policy")


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


def autogen(prompt: str) -> str:
    from autogen_agentchat.agents import AssistantAgent
    from autogen_ext.models.openai import OpenAIChatCompletionClient

    info: Any = {"vision": False, "function_calling": True, "json_output": False, "family": "unknown"}
    info["structured_output"] = False
    model = OpenAIChatCompletionClient(model="policy", model_info=info)
    agent = AssistantAgent("seer", model, tools=[look], reflect_on_tool_use=True, max_tool_iterations=4)
    made: Any = asyncio.run(agent.run(task=prompt)).messages[-1]
    return str(made.content)


def strands(prompt: str) -> str:
    from strands import Agent, tool
    from strands.models.openai import OpenAIModel

    return str(Agent(OpenAIModel(model_id="policy"), tools=[tool(look)], callback_handler=None)(prompt))


def dspy(prompt: str) -> str:
    import dspy as library

    library.configure(lm=library.LM("openai/policy", api_base=URL, cache=False))
    return str(library.ReAct("question -> answer", tools=[look])(question=prompt).answer)


def google_adk(prompt: str) -> str:
    from google.adk.agents import LlmAgent
    from google.adk.models.lite_llm import LiteLlm
    from google.adk.runners import InMemoryRunner
    from google.genai.types import Content, Part

    async def work() -> str:
        agent = LlmAgent(name="seer", model=LiteLlm("openai/policy"), tools=[look])
        runner, said = InMemoryRunner(agent, app_name="seer"), ""
        session = await runner.session_service.create_session(app_name="seer", user_id="me")
        message = Content(role="user", parts=[Part(text=prompt)])
        async for event in runner.run_async(user_id="me", session_id=session.id, new_message=message):
            said = event.content.parts[0].text or said
        return said

    return asyncio.run(work())


def crewai(prompt: str) -> str:
    from crewai import LLM, Agent
    from crewai.tools import tool

    asked: Any = {"role": "seer", "goal": "look", "backstory": "none", "tools": [tool("look")(look)]}
    return str(Agent(llm=LLM("openai/policy", base_url=URL, api_key=KEY), **asked).kickoff(prompt).raw)


if __name__ == "__main__":
    program: Callable[[str], str] = globals()[sys.argv[1]]
    Path("answer.txt").write_text(program(sys.argv[2]).strip())
