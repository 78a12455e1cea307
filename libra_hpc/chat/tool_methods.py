"""Methods that the policy may call: JSON schema from signature and docstring, arguments from what the policy wrote."""

from __future__ import annotations

import asyncio
import inspect
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from libra_hpc.errors import invalid
from libra_hpc.tasks.base import ToolResult
from libra_hpc.tasks.tokenizer import joined

from .dialects import ToolCall

MARK = "libra_hpc_tool_timeout_s"
"""Attribute of a method that is a tool."""
GIVEN = ("row", "box", "chat")
"""Arguments that the episode gives, by name; all others are the policy's."""
BAD_CALL = "bad_call"
"""Name, in signals, of calls that reach no tool: what the policy wrote would be a name of its own each time."""


class BadCall(Exception):
    """The policy's call reaches no tool; the text is the answer."""


class ToolMethod:
    """One tool of a task; raises `UserError` for a signature that has no schema."""

    def __init__(self, owner: str, name: str, function: Callable[..., Any]) -> None:
        self.name, self._function, self._timeout_s = name, function, getattr(function, MARK)
        if not inspect.iscoroutinefunction(function):
            raise _mistake(owner, name, "it is no coroutine function")
        try:
            taken = list(inspect.signature(function, eval_str=True).parameters.values())[1:]
            self._given = [one.name for one in taken if one.name in GIVEN]
            fields = [_field(one) for one in taken if one.name not in GIVEN]
            self._arguments = msgspec.defstruct(name, fields, kw_only=True, forbid_unknown_fields=True)
            msgspec.json.Decoder(self._arguments)  # makes the type whole, for `msgspec.convert`
            parts = msgspec.json.schema_components([self._arguments])[1]
        except (TypeError, NameError, ValueError) as error:
            raise _mistake(owner, name, str(error)) from error
        parameters = {key: value for key, value in parts.pop(name).items() if key != "title"}
        if parts:
            parameters["$defs"] = parts
        description = inspect.getdoc(function) or ""
        self.schema = {
            "type": "function",
            "function": {"name": name, "description": description, "parameters": parameters},
        }

    @property
    def timeout_s(self) -> float:
        """Most seconds of a call; 0: no limit of its own."""
        return float(self._timeout_s or 0.0)

    def arguments(self, call: ToolCall) -> dict[str, Any]:
        """Arguments of a call by name; raises `BadCall`."""
        if not isinstance(call.arguments, dict):
            raise BadCall("the arguments are no JSON object")
        try:
            found = msgspec.convert(call.arguments, self._arguments, strict=False)
        except msgspec.ValidationError as error:
            raise BadCall(str(error)) from error
        return {name: getattr(found, name) for name in self._arguments.__struct_fields__}

    async def run(self, task: Any, given: Mapping[str, Any], arguments: Mapping[str, Any]) -> ToolResult:
        """Call the method of ``task``. `ValueError` and no answer in time are answers."""
        started = time.perf_counter()
        outcome, value = "ok", None
        try:
            async with asyncio.timeout(self._timeout_s) as limit:
                value = await self._function(task, **{name: given[name] for name in self._given}, **arguments)
        except ValueError as error:
            outcome, value = "error", f"error: {error}"
        except TimeoutError:
            if not limit.expired():
                raise
            outcome = "timeout"
        seconds = time.perf_counter() - started
        if outcome == "ok" and 0.0 < self.timeout_s < seconds:
            outcome = "timeout"
            print(f"tool {self.name} blocks: all episodes of this host waited {seconds:.1f} s for it", file=sys.stderr)
        if outcome == "timeout":
            value = f"error: no answer within {self._timeout_s:g} s"
        return value if isinstance(value, ToolResult) else ToolResult(outcome, value, seconds)


def tool_methods(owner: type) -> dict[str, ToolMethod]:
    """Tools of a class by name, those of its bases first, in the order of the file."""
    found = {name: one for base in reversed(owner.__mro__) for name, one in vars(base).items() if hasattr(one, MARK)}
    return {name: ToolMethod(owner.__name__, name, getattr(owner, name)) for name in found}


def find_tool(tools: Mapping[str, ToolMethod], call: ToolCall) -> tuple[ToolMethod, dict[str, Any]]:
    """The tool of a call and its arguments; raises `BadCall`."""
    if call.error:
        raise BadCall(call.error)
    if call.name not in tools:
        raise BadCall(f"there is no tool {call.name!r}; tools: {', '.join(tools) or 'none'}")
    return tools[call.name], tools[call.name].arguments(call)


def answer_text(result: ToolResult) -> str:
    """What the policy reads: text as it is, parts of a message joined, other values as JSON; refuses images."""
    value = result.value
    if isinstance(value, list) and value and all(isinstance(one, dict) and "type" in one for one in value):
        value = joined(value)
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    return text.encode(errors="replace").decode()


def _field(one: inspect.Parameter) -> tuple[Any, ...]:
    if one.kind not in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY):
        raise TypeError(f"argument {one.name!r} has no name for the policy")
    if one.annotation is one.empty:
        raise TypeError(f"argument {one.name!r} has no type")
    return (one.name, one.annotation) if one.default is one.empty else (one.name, one.annotation, one.default)


def _mistake(owner: str, name: str, why: str) -> Exception:
    valid = "async def NAME(self, box, ARGUMENT: TYPE, ...) -> str"
    return invalid("task.name", f"{owner}.{name}", f"not a tool ({why})", valid)
