"""OpenAI's responses: ``/v1/responses``, without state of its own: an agent sends its whole history."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from libra_hpc.tasks.tokenizer import Message

from .agent_request import (
    COMMON,
    FREE,
    NEVER,
    UNENFORCED,
    AgentRequest,
    Answer,
    Fields,
    Histories,
    Known,
    call,
    listed,
    mistake,
    openai_error,
    request,
    text_of,
    tools_of,
    unenforced,
)

error, LAST = openai_error, ""
FIELDS: Fields = {
    **COMMON,
    **dict.fromkeys(("input", "instructions", "max_output_tokens", "max_tool_calls", "background_options"), FREE),
    **dict.fromkeys(("reasoning.summary", "reasoning.generate_summary", "image"), FREE),
    **dict.fromkeys(("background", "enable_response_messages"), Known((False,))),
    **dict.fromkeys(("previous_response_id", "conversation", "prompt", "access_programs"), NEVER),
    "previous_input_messages": Known(([],)),
    "include": Known(([], ["reasoning.encrypted_content"])),
    "text.format": Known(({"type": "text"},), True),
    "text.verbosity": Known(("medium",), True),
    "truncation": Known(("disabled",), True),
    "context_management": Known(([],), True),
    **dict.fromkeys(("reasoning.effort", "reasoning.context", "reasoning.mode"), UNENFORCED),
}


def read(body: Mapping[str, Any], before: Histories) -> AgentRequest:
    wish = unenforced(body, FIELDS)
    given = body.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else listed("input", given)
    messages = before.read("input", items, _add)
    system, tools = str(body.get("instructions") or ""), tools_of(body)
    return request(body, system, messages, tools, "max_output_tokens", unenforced=wish)


def _add(messages: list[Message], field: str, item: Mapping[str, Any]) -> None:
    """Add an item: text and calls of one turn of the policy are one message."""
    kind = item.get("type", "message")
    if kind == "reasoning":
        return
    own = kind == "function_call" or item.get("role") == "assistant"
    if own:
        begun = bool(messages) and messages[-1]["role"] == "assistant"
        messages.append({**messages.pop()} if begun else {"role": "assistant", "content": ""})
    match kind:
        case "function_call":
            made = call(field, item.get("call_id"), item.get("name"), item.get("arguments"))
            messages[-1]["tool_calls"] = [*messages[-1].get("tool_calls", ()), made]
        case "function_call_output":
            text = text_of(f"{field}.output", item.get("output"))
            messages.append({"role": "tool", "tool_call_id": str(item.get("call_id") or ""), "content": text})
        case "message" if own:
            messages[-1]["content"] += text_of(f"{field}.content", item.get("content"))
        case "message" if item.get("role") in ("user", "system", "developer"):
            role = "user" if item["role"] == "user" else "system"
            messages.append({"role": role, "content": text_of(f"{field}.content", item.get("content"))})
        case "message":
            raise mistake(f"{field}.role", item.get("role"), "user, system, developer or assistant")
        case _:
            raise mistake(f"{field}.type", kind, "message, function_call, function_call_output or reasoning")


def answer(asked: AgentRequest, made: Answer) -> dict[str, Any]:
    return {
        "id": f"resp_{made.id}",
        "object": "response",
        "created_at": time.time(),
        "model": asked.model,
        "status": "incomplete" if made.cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if made.cut else None,
        "output": _items(made),
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [{"type": "function", "strict": False, **one["function"]} for one in asked.tools],
        "usage": {
            "input_tokens": made.prompt_tokens,
            "output_tokens": made.new_tokens,
            "total_tokens": made.prompt_tokens + made.new_tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens_details": {"reasoning_tokens": 0},
        },
    }


def events(asked: AgentRequest, made: Answer) -> Iterator[tuple[str, dict[str, Any]]]:
    whole = answer(asked, made)
    empty = {**whole, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    steps: list[dict[str, Any]] = [{"type": "response.created", "response": empty}]
    for place, item in enumerate(whole["output"]):
        started = {**item, "status": "in_progress"} | ({"content": []} if item["type"] == "message" else {})
        steps.append({"type": "response.output_item.added", "output_index": place, "item": started})
        at = {"output_index": place, "item_id": item["id"]}
        if item["type"] == "message":
            part, at = item["content"][0], {**at, "content_index": 0}
            blank = {**part, "text": ""}
            steps.append({"type": "response.content_part.added", **at, "part": blank})
            steps.append({"type": "response.output_text.delta", **at, "delta": part["text"], "logprobs": []})
            steps.append({"type": "response.output_text.done", **at, "text": part["text"], "logprobs": []})
            steps.append({"type": "response.content_part.done", **at, "part": part})
        else:
            named = {**at, "name": item["name"], "arguments": item["arguments"]}
            steps.append({"type": "response.function_call_arguments.delta", **at, "delta": item["arguments"]})
            steps.append({"type": "response.function_call_arguments.done", **named})
        steps.append({"type": "response.output_item.done", "output_index": place, "item": item})
    steps.append({"type": f"response.{whole['status']}", "response": whole})
    for number, step in enumerate(steps):
        yield step["type"], {**step, "sequence_number": number}


def _items(made: Answer) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    if made.text or not made.calls:
        part = {"type": "output_text", "text": made.text, "annotations": []}
        message = {"type": "message", "role": "assistant", "status": "completed", "content": [part]}
        items.append({"id": f"msg_{made.id}", **message})
    for one in made.calls:
        function = {"call_id": one.id, "name": one.name, "arguments": one.arguments}
        items.append({"id": f"fc_{one.id}", "type": "function_call", "status": "completed", **function})
    return items
