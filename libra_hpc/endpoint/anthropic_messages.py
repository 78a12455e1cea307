"""Anthropic's messages: ``/v1/messages``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from libra_hpc.tasks.tokenizer import Message

from .agent_request import (
    CONTEXT_FULL,
    FREE,
    NEVER,
    UNENFORCED,
    AgentRequest,
    Answer,
    Fields,
    Histories,
    Known,
    RequestRefused,
    call,
    listed,
    mistake,
    put,
    request,
    text_of,
    tools_of,
    unenforced,
)

LAST = ""
FIELDS: Fields = {
    **dict.fromkeys(("model", "messages", "system", "max_tokens", "tools", "stream", "stop_sequences", "thread"), FREE),
    # The run's own values count, whatever a request has.
    **dict.fromkeys(("temperature", "top_p", "top_k"), FREE),
    # Bookkeeping, money and speed.
    **dict.fromkeys(("metadata", "service_tier", "cache_control", "inference_geo", "speed", "user_profile_id"), FREE),
    **dict.fromkeys(("workspace_id", "billing_policy", "diagnostics", "fallbacks", "fallback_credit_token"), FREE),
    **dict.fromkeys(("thinking.display", "thinking.block_binding", "tool_choice.name", "cache_salt"), FREE),
    **dict.fromkeys(("container", "compaction"), NEVER),
    "mcp_servers": Known(([],)),
    "tool_choice.type": Known(("auto",), True),
    "tool_choice.disable_parallel_tool_use": Known((False,), True),
    "thinking.type": Known(("adaptive",), True),
    "context_management.edits": Known(([],), True),
    "chat_template_kwargs": Known(({},), True),
    **dict.fromkeys(("thinking.budget_tokens", "output_config.effort", "output_config.format"), UNENFORCED),
    **dict.fromkeys(("output_config.task_budget", "output_format"), UNENFORCED),
}
THREADS = "thread_unsupported_request"
"""Code by which Anthropic's own client learns to send the whole history with each request."""
BLOCKS = "text, tool_use, tool_result or thinking"


def read(body: Mapping[str, Any], before: Histories) -> AgentRequest:
    wish = unenforced(body, FIELDS)
    if body.get("thread") is not None:
        raise RequestRefused(400, THREADS, "thread: no history is held here; valid: null, with all messages.")
    system = text_of("system", body.get("system"))
    messages = before.read("messages", listed("messages", body.get("messages")), _add)
    tools = tools_of(body, "custom", parameters="input_schema")
    return request(body, system, messages, tools, "max_tokens", unenforced=wish)


def _add(messages: list[Message], field: str, one: Mapping[str, Any]) -> None:
    """Add messages in OpenAI's form: results of tools are messages of their own."""
    role, content = one.get("role"), one.get("content")
    if role not in ("user", "assistant"):
        raise mistake(f"{field}.role", role, "user or assistant")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else listed(f"{field}.content", content)
    found: list[Message] = []
    text, calls = "", list[dict[str, Any]]()
    for n, block in enumerate(blocks):
        match block.get("type"):
            case "text":
                text += str(block.get("text", ""))
            case "tool_use":
                calls.append(call(f"{field}.content[{n}]", block.get("id"), block.get("name"), block.get("input")))
            case "tool_result":
                said = text_of(f"{field}.content[{n}].content", block.get("content"))
                found.append({"role": "tool", "tool_call_id": str(block.get("tool_use_id") or ""), "content": said})
            case "thinking" | "redacted_thinking":
                pass
            case kind:
                raise mistake(f"{field}.content[{n}].type", kind, BLOCKS)
    if text or calls or not found:
        found.append({"role": role, "content": text} | ({"tool_calls": calls} if calls else {}))
    for message in found:
        put(messages, message)


def answer(asked: AgentRequest, made: Answer) -> dict[str, Any]:
    if asked.counts:
        return {"input_tokens": made.prompt_tokens}
    return {
        "id": f"msg_{made.id}",
        "type": "message",
        "role": "assistant",
        "model": asked.model,
        "content": _blocks(made),
        "stop_reason": (reason := _reason(made)),
        "stop_sequence": made.stop if reason == "stop_sequence" else None,
        "usage": {"input_tokens": made.prompt_tokens, "output_tokens": made.new_tokens},
    }


def _reason(made: Answer) -> str:
    return "max_tokens" if made.cut else "tool_use" if made.calls else "stop_sequence" if made.stop else "end_turn"


def _blocks(made: Answer) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if made.thinking:
        blocks.append({"type": "thinking", "thinking": made.thinking, "signature": ""})
    if made.text:
        blocks.append({"type": "text", "text": made.text})
    for one in made.calls:
        blocks.append({"type": "tool_use", "id": one.id, "name": one.name, "input": json.loads(one.arguments)})
    return blocks


def events(asked: AgentRequest, made: Answer) -> Iterator[tuple[str, dict[str, Any]]]:
    whole = answer(asked, made)
    start = {
        **whole,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {**whole["usage"], "output_tokens": 0},
    }
    yield _named({"type": "message_start", "message": start})
    for place, block in enumerate(whole["content"]):
        empty, deltas = _streamed(block)
        yield _named({"type": "content_block_start", "index": place, "content_block": empty})
        for delta in deltas:
            yield _named({"type": "content_block_delta", "index": place, "delta": delta})
        yield _named({"type": "content_block_stop", "index": place})
    ended = {key: whole[key] for key in ("stop_reason", "stop_sequence")}
    yield _named({"type": "message_delta", "delta": ended, "usage": whole["usage"]})
    yield _named({"type": "message_stop"})


def _named(event: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    return event["type"], event


def _streamed(block: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A block without its content, and what fills it."""
    match block["type"]:
        case "text":
            return {**block, "text": ""}, [{"type": "text_delta", "text": block["text"]}]
        case "thinking":
            return {**block, "thinking": ""}, [{"type": "thinking_delta", "thinking": block["thinking"]}]
        case _:
            partial = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
            return {**block, "input": {}}, [partial]


def error(why: RequestRefused) -> dict[str, Any]:
    # Agents look for these words before they compact their history.
    text = f"prompt is too long: {why.why}" if why.code == CONTEXT_FULL else why.why
    kind = {400: "invalid_request_error", 404: "not_found_error"}.get(why.status, "api_error")
    details = {"details": {"error_code": THREADS}} if why.code == THREADS else {}
    return {"type": "error", "error": {"type": kind, "message": text, **details}}
