"""OpenAI's chat completions: ``/v1/chat/completions``."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from libra_hpc.chat.dialects import message_call
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
    put,
    request,
    text_of,
    tools_of,
    unenforced,
)

error, LAST = openai_error, "[DONE]"
FIELDS: Fields = {
    **COMMON,
    **dict.fromkeys(("messages", "max_completion_tokens", "max_tokens", "prediction", "truncation_side"), FREE),
    **dict.fromkeys(("n", "best_of"), Known((1,))),
    **dict.fromkeys(("logprobs", "echo", "continue_final_message", "use_beam_search"), Known((False,))),
    **dict.fromkeys(("add_special_tokens", "return_tokens_as_token_ids", "return_token_offsets"), Known((False,))),
    **dict.fromkeys(("return_prompt_text", "early_stopping"), Known((False,))),
    **dict.fromkeys(("functions", "documents"), Known(([],))),
    **dict.fromkeys(
        ("audio", "web_search_options", "chat_template", "truncate_prompt_tokens", "allowed_token_ids"), NEVER
    ),
    **dict.fromkeys(("prompt_logprobs", "logprob_token_ids", "repetition_detection"), NEVER),
    **dict.fromkeys(("min_tokens", "routed_experts_prompt_start"), Known((0,))),
    "add_generation_prompt": Known((True,)),
    "function_call": Known(("none",)),
    "modalities": Known((["text"],)),
    "response_format": Known(({"type": "text"},), True),
    "verbosity": Known(("medium",), True),
    **dict.fromkeys(("reasoning_effort", "thinking_token_budget"), UNENFORCED),
    **dict.fromkeys(("guided_whitespace_pattern", "guided_decoding_backend"), UNENFORCED),
}
ROLES = ("system", "developer", "user", "assistant", "tool")


def read(body: Mapping[str, Any], before: Histories) -> AgentRequest:
    wish = unenforced(body, FIELDS)
    messages = before.read("messages", listed("messages", body.get("messages")), _add)
    tools, most = tools_of(body, inside="function"), ("max_completion_tokens", "max_tokens")
    return request(body, "", messages, tools, *most, unenforced=wish)


def _add(messages: list[Message], field: str, one: Mapping[str, Any]) -> None:
    role = one.get("role")
    if role not in ROLES:
        raise mistake(f"{field}.role", role, ", ".join(ROLES))
    found: Message = {
        "role": "system" if role == "developer" else role,
        "content": text_of(f"{field}.content", one.get("content")),
    }
    for name in ("tool_call_id", "name", "reasoning_content"):
        if one.get(name):
            found[name] = str(one[name])
    if calls := one.get("tool_calls"):
        found["tool_calls"] = [
            call(f"{field}.tool_calls[{n}].function", made.get("id"), of.get("name"), of.get("arguments"))
            for n, made in enumerate(listed(f"{field}.tool_calls", calls))
            for of in listed(f"{field}.tool_calls[{n}]", [made.get("function")])
        ]
    put(messages, found)


def answer(asked: AgentRequest, made: Answer) -> dict[str, Any]:
    message = {"role": "assistant", **_shown(made)}
    choice = {"index": 0, "finish_reason": _finish(made), "logprobs": None, "message": message}
    return {**_head(asked, made), "object": "chat.completion", "choices": [choice], "usage": _usage(made)}


def events(asked: AgentRequest, made: Answer) -> Iterator[tuple[str, dict[str, Any]]]:
    head = {**_head(asked, made), "object": "chat.completion.chunk"}
    delta = {"role": "assistant", **_shown(made)}
    if made.calls:
        delta["tool_calls"] = [{"index": n, **one} for n, one in enumerate(delta["tool_calls"])]
    yield "", {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
    yield "", {**head, "choices": [{"index": 0, "delta": {}, "finish_reason": _finish(made)}]}
    if asked.stream_usage:  # a client that did not ask for a chunk without choices may not read it
        yield "", {**head, "choices": [], "usage": _usage(made)}


def _head(asked: AgentRequest, made: Answer) -> dict[str, Any]:
    return {"id": f"chatcmpl-{made.id}", "created": int(time.time()), "model": asked.model}


def _shown(made: Answer) -> dict[str, Any]:
    calls = [message_call(one.id, one.name, one.arguments) for one in made.calls]
    return (
        {"content": made.text or None}
        | ({"tool_calls": calls} if calls else {})
        | ({"reasoning_content": made.thinking} if made.thinking else {})
    )


def _finish(made: Answer) -> str:
    return "length" if made.cut else "tool_calls" if made.calls else "stop"


def _usage(made: Answer) -> dict[str, Any]:
    total = made.prompt_tokens + made.new_tokens
    return {"prompt_tokens": made.prompt_tokens, "completion_tokens": made.new_tokens, "total_tokens": total}
