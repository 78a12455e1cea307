"""Reads fields of request bodies; what would change the turn and cannot be had is refused by name."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from libra_hpc.chat.dialects import message_call
from libra_hpc.errors import UserError
from libra_hpc.tasks.chat_template import joined

from .agent_request import AgentRequest, RequestRefused

NO_CHANGE: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "stop": ([],),
    "stop_sequences": ([],),
    "logprobs": (False,),
    "logit_bias": ({},),
    "functions": ([],),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto", {"type": "auto"}),
    "previous_response_id": (),
    "conversation": (),
    "background": (False,),
}
"""Fields that would change a turn, and their values beside null that do not. Temperature and penalties are the run's,
whatever a request has."""
TEXT = ("text", "input_text", "output_text")


def mistake(field: str, value: Any, valid: str) -> RequestRefused:
    return RequestRefused(400, "invalid_request_error", f"{field} = {value!r:.100}: not possible here; valid: {valid}.")


def openai_error(why: RequestRefused) -> dict[str, Any]:
    return {"error": {"message": why.why, "type": "invalid_request_error", "code": why.code, "param": None}}


def refuse_changes(body: Mapping[str, Any]) -> None:
    """Raise `RequestRefused` for the first field that would change a turn."""
    for field, same in NO_CHANGE.items():
        if (value := body.get(field)) is not None and value not in same:
            raise mistake(field, value, " or ".join(json.dumps(one) for one in same) or "null")


def request(
    body: Mapping[str, Any], messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]], *most: str
) -> AgentRequest:
    """A request; ``most``: names of the field with the most tokens, the first one that the body has counts."""
    limits = [body[name] for name in most if body.get(name) is not None]
    if limits and not (isinstance(limits[0], int) and limits[0] >= 1):
        raise mistake(most[0], limits[0], "an integer >= 1")
    return AgentRequest(
        messages=list(messages),
        tools=list(tools),
        max_tokens=limits[0] if limits else 0,
        model=str(body.get("model") or "policy"),
        stream=bool(body.get("stream")),
    )


def text_of(field: str, content: Any) -> str:
    """Text of a message's content, whose parts are joined."""
    if not isinstance(content, str | list | None):
        raise mistake(field, content, "text, or a list of parts")
    try:
        return joined(content, field, TEXT) or ""
    except UserError as error:
        raise RequestRefused(400, "invalid_request_error", str(error)) from error


def listed(field: str, value: Any) -> list[dict[str, Any]]:
    """A list of objects."""
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        raise mistake(field, value, "a list of objects")
    return value


def call(field: str, identity: Any, name: Any, arguments: Any) -> dict[str, Any]:
    """A tool call of a message; arguments that are no JSON object stay text."""
    if not isinstance(name, str):
        raise mistake(f"{field}.name", name, "a string")
    if isinstance(arguments, str):
        try:
            read = json.loads(arguments or "{}")
            arguments = read if isinstance(read, dict) else arguments
        except ValueError:
            pass
    return message_call(str(identity or ""), name, arguments)


def tools_of(
    body: Mapping[str, Any], kind: str = "function", inside: str = "", parameters: str = "parameters"
) -> list[dict[str, Any]]:
    """The tools of a request, all of type ``kind``, in OpenAI's form; ``inside``: the field that has the function."""
    found = []
    for n, tool in enumerate(listed("tools", body.get("tools") or [])):
        if tool.get("type", "custom") != kind or not isinstance(tool.get(inside, {}), dict):
            raise mistake(f"tools[{n}].type", tool.get("type"), kind)
        field = f"tools[{n}].{inside}" if inside else f"tools[{n}]"
        found.append(_tool_schema(field, tool.get(inside, {}) if inside else tool, parameters))
    return found


def _tool_schema(field: str, tool: Mapping[str, Any], parameters: str) -> dict[str, Any]:
    """A function in OpenAI's form; the fields that no template reads are left out."""
    if not isinstance(tool.get("name"), str):
        raise mistake(f"{field}.name", tool.get("name"), "a string")
    function = {
        "name": tool["name"],
        "description": tool.get("description") or "",
        "parameters": tool.get(parameters) or {"type": "object", "properties": {}},
    }
    return {"type": "function", "function": function}
