"""One request of an agent and its answer, whatever API it speaks, and how fields of its body are read.

What would change the turn and cannot be had is refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from libra_hpc.chat.dialects import Reply, message_call
from libra_hpc.errors import UserError, nearest
from libra_hpc.tasks.tokenizer import Message, joined


class RequestRefused(Exception):
    """A request that gets no turn: HTTP status, a code that clients know, and one sentence."""

    def __init__(self, status: int, code: str, why: str) -> None:
        super().__init__(why)
        self.status, self.code, self.why = status, code, why


REFUSED = "invalid_request_error"
"""Code of a request that asks what cannot be had here; a number of the trajectory counts them."""
CONTEXT_FULL = "context_length_exceeded"
"""Code of a request whose messages leave no room for a turn; agents that compact their history know it."""


class AgentRequest(msgspec.Struct, frozen=True):
    """A conversation that the policy shall go on with."""

    messages: list[Message]
    """In OpenAI's form; content is text or None, arguments of calls are what JSON says."""
    keys: list[Any]
    """`identity` of each message."""
    tools: list[dict[str, Any]]
    """JSON schemas in OpenAI's form."""
    max_tokens: int = 0
    """Most tokens of the turn; 0: the task's."""
    unenforced: str = ""
    """Why it asks for a form of the turn that nothing here enforces."""
    counts: bool = False
    """Whether it asks for the tokens of its context instead of a turn."""
    stop: tuple[str, ...] = ()
    """Strings that end the turn; its answer has the text before."""
    model: str = "policy"
    stream: bool = False
    stream_usage: bool = False
    """Whether a stream of chat completions ends with the numbers of tokens."""


class AnsweredCall(msgspec.Struct, frozen=True):
    """A tool call of the answer; ``arguments`` is JSON."""

    id: str
    name: str
    arguments: str


class Answer(msgspec.Struct, frozen=True):
    """One turn of the policy."""

    id: str
    text: str
    thinking: str
    calls: tuple[AnsweredCall, ...]
    cut: bool
    """Whether the most tokens ended it."""
    prompt_tokens: int
    new_tokens: int
    """Tokens of the turn that are kept."""
    stop: str = ""
    """The stop string that ended it; empty: none."""

    @property
    def message(self) -> Message:
        """The message that an agent puts into its history."""
        calls = [message_call(one.id, one.name, json.loads(one.arguments)) for one in self.calls]
        return {"role": "assistant", "content": self.text} | ({"tool_calls": calls} if calls else {})


def identity(messages: Sequence[Message], number: int) -> Any:
    """What makes two messages the same, behind those before it.

    Calls are known by their position, because agents rename their ids. On its way the policy's text may have got its
    thinking back or lost white space around it, and a number of its arguments a ``.0``: to JavaScript both are one.
    """
    message = messages[number]
    text, calls = message.get("content") or "", message.get("tool_calls") or ()
    if message["role"] == "assistant":
        text = text.rpartition("</think>")[2].strip()
    called = [(one["function"]["name"], one["function"]["arguments"]) for one in calls]
    return message["role"], text, called, _answered_call(messages, number)


def _answered_call(messages: Sequence[Message], number: int) -> int | str:
    """The place of the call that a result answers among those of the turn before it, or the id of none of them."""
    wanted = messages[number].get("tool_call_id") or ""
    before = (messages[at] for at in range(number - 1, -1, -1) if wanted and messages[at]["role"] == "assistant")
    ids = [one.get("id") for one in next(before, {}).get("tool_calls") or ()]
    return ids.index(wanted) if wanted in ids else wanted


def put(messages: list[Message], found: Message) -> None:
    """Add a message; neighbours of the assistant are one, as the policy wrote them."""
    last = messages[-1] if messages else {}
    if not found["role"] == last.get("role") == "assistant":
        messages.append(found)
        return
    calls = [*last.get("tool_calls", ()), *found.get("tool_calls", ())]
    text = (last["content"] or "") + (found["content"] or "")
    messages[-1] = last | found | {"content": text} | ({"tool_calls": calls} if calls else {})


def answer_of(reply: Reply, identity: str, prompt: int, sampled: Sequence[int], cut: bool) -> Answer:
    """The answer that shows a turn. A call that cannot be read is text: its agent answers it as it likes."""
    good = [one for one in reply.calls if not one.error and isinstance(one.arguments, dict)]
    bad = "".join(one.raw for one in reply.calls if one not in good)
    calls = tuple(
        AnsweredCall(f"call_{identity}_{number}", one.name, json.dumps(one.arguments))
        for number, one in enumerate(good)
    )
    return Answer(identity, reply.text + bad, reply.thinking, calls, cut, prompt, len(sampled))


class Known(NamedTuple):
    """A field that requests may have; one of no table is refused by its name."""

    values: tuple[Any, ...] | None = None
    """What may be given beside null; None: anything, because it is honoured or changes no turn."""
    unenforced: bool = False
    """Whether other values ask for a form of the turn that nothing here enforces: ``env.unenforced`` decides."""


Fields = Mapping[str, Known]
"""The table of one API: what is no row and an object is known by its own fields, ``object.field``."""

FREE, NEVER, UNENFORCED = Known(), Known(()), Known((), True)
COMMON: Fields = {
    **dict.fromkeys(("model", "tools", "stream", "stop"), FREE),
    # The run's own values count, whatever a request has.
    **dict.fromkeys(("temperature", "top_p", "top_k", "min_p", "seed", "frequency_penalty", "presence_penalty"), FREE),
    **dict.fromkeys(("repetition_penalty", "length_penalty", "metadata", "service_tier", "cache_salt"), FREE),
    # Bookkeeping, money, speed, and what media need.
    **dict.fromkeys(("user", "safety_identifier", "store", "prompt_cache_key", "prompt_cache_options"), FREE),
    **dict.fromkeys(("prompt_cache_retention", "priority", "request_id", "session_id", "stream_interval"), FREE),
    **dict.fromkeys(("mm_processor_kwargs", "media_io_kwargs", "mm_payload", "stream_options.include_usage"), FREE),
    **dict.fromkeys(("stream_options.include_obfuscation", "stream_options.continuous_usage_stats"), FREE),
    **dict.fromkeys(("return_mm_kwargs", "watermarking", "ignore_eos"), Known((False,))),
    **dict.fromkeys(("include_stop_str_in_output", "return_token_ids"), Known((False,))),
    **dict.fromkeys(("skip_special_tokens", "spaces_between_special_tokens", "include_reasoning"), Known((True,))),
    **dict.fromkeys(("kv_transfer_params", "ec_transfer_params", "vllm_xargs", "moderation"), NEVER),
    **dict.fromkeys(("stop_token_ids", "bad_words"), Known(([],))),
    "logit_bias": Known(({},)),
    "top_logprobs": Known((0,)),
    "tool_choice": Known(("auto", {"type": "auto"}), True),
    "parallel_tool_calls": Known((True,), True),
    "chat_template_kwargs": Known(({},), True),
    **dict.fromkeys(
        ("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"), UNENFORCED
    ),
}
"""What OpenAI's two APIs and vLLM's additions to them share."""
OF_TOOLS = ("tool_choice", "parallel_tool_calls")
"""Fields that mean nothing without tools."""
TEXT = ("text", "input_text", "output_text")


KEPT = 4
"""Histories of an episode that are kept as they were read: its agent's, and those of sub-agents at work beside it."""
Add = Callable[[list[Message], str, dict[str, Any]], None]
"""Reads an item of a request, by its field, behind the messages before it. It changes none of them: it replaces."""


class _History(NamedTuple):
    """The items of a request, and what they were read as."""

    items: list[dict[str, Any]]
    messages: list[Message]
    keys: list[Any]
    ends: list[int]
    """Messages up to each item, it included."""


class Histories:
    """What an episode's newest requests had: of a request that begins like one of them only the rest is read."""

    def __init__(self) -> None:
        self._kept: list[_History] = []

    def read(self, field: str, items: list[dict[str, Any]], add: Add) -> tuple[list[Message], list[Any]]:
        """Messages and their keys; raises `RequestRefused` as ``add`` does."""
        same, best = 0, _History([], [], [], [])
        for one in self._kept:
            if (found := _equal(one.items, items)) > same:
                same, best = found, one
        goes_on = 0 < same == len(best.items)
        # A message may have more than one item: it is read again from its first one.
        while 0 < same < len(best.ends) and best.ends[same] == best.ends[same - 1]:
            same -= 1
        end = best.ends[same - 1] if same else 0
        # The old items, whose text the messages share.
        made = _History([*best.items[:same], *items[same:]], best.messages[:end], [], best.ends[:same])
        for number in range(same, len(items)):
            add(made.messages, f"{field}[{number}]", items[number])
            made.ends.append(len(made.messages))
        # The next item may belong to the last message.
        whole = max(0, end - 1)
        made.keys.extend(best.keys[:whole])
        made.keys.extend(identity(made.messages, number) for number in range(whole, len(made.messages)))
        self._kept = [*(one for one in self._kept if one is not best or not goes_on), made][-KEPT:]
        return made.messages, made.keys


def _equal(before: list[dict[str, Any]], items: list[dict[str, Any]]) -> int:
    """How many items two requests have in common from the first one on."""
    pairs = enumerate(zip(before, items, strict=False))
    return next((number for number, (one, other) in pairs if one != other), min(len(before), len(items)))


def mistake(field: str, value: Any, valid: str) -> RequestRefused:
    return RequestRefused(400, REFUSED, f"{field} = {value!r:.100}: not possible here; valid: {valid}.")


def openai_error(why: RequestRefused) -> dict[str, Any]:
    return {"error": {"message": why.why, "type": "invalid_request_error", "code": why.code, "param": None}}


def unenforced(body: Mapping[str, Any], fields: Fields) -> str:
    """Why a request asks for what nothing here enforces; empty: it does not.

    Raises `RequestRefused` for a field that is not known, and for a value that can never be had.
    """
    found = ""
    for field, value in _given(body, fields).items():
        if field not in fields:
            raise RequestRefused(400, REFUSED, f"{field}: no such field is known here{nearest(field, fields)}.")
        values, accepted = fields[field]
        if values is not None and value not in values:
            valid = ", ".join(("null", *map(json.dumps, values)))
            if not accepted:
                raise mistake(field, value, valid)
            found = found or mistake(field, value, f"{valid}; any, where env.unenforced = 'accept' in the run file").why
    return found


def _given(body: Mapping[str, Any], fields: Fields) -> dict[str, Any]:
    """Fields that mean something here; those of an object that is no row of the table are rows themselves."""
    given = {name: one for name, one in body.items() if one is not None and (name not in OF_TOOLS or body.get("tools"))}
    for name in [one for one, value in given.items() if one not in fields and isinstance(value, Mapping)]:
        given |= {f"{name}.{inner}": one for inner, one in given.pop(name).items() if one is not None}
    return given


def request(
    body: Mapping[str, Any],
    system: str,
    read: tuple[list[Message], list[Any]],
    tools: list[dict[str, Any]],
    *most: str,
    unenforced: str,
) -> AgentRequest:
    """A request of messages that were read with their keys, behind one of the system unless that is empty.

    ``most``: names of the field with the most tokens, the first one that the body has counts.
    """
    last = read[0][-1]["role"] if read[0] else None
    if last in (None, "assistant"):
        raise mistake("the last message's role", last, "user or tool, because a turn begins with no given text")
    first: list[Message] = [{"role": "system", "content": system}] if system else []
    limits = [body[name] for name in most if body.get(name) is not None]
    if limits and not (isinstance(limits[0], int) and limits[0] >= 1):
        raise mistake(most[0], limits[0], "an integer >= 1")
    return AgentRequest(
        messages=[*first, *read[0]],
        keys=[*(identity(first, number) for number in range(len(first))), *read[1]],
        tools=tools,
        max_tokens=limits[0] if limits else 0,
        unenforced=unenforced,
        stop=_stop(body),
        model=str(body.get("model") or "policy"),
        stream=bool(body.get("stream")),
        stream_usage=bool((body.get("stream_options") or {}).get("include_usage")),
    )


def _stop(body: Mapping[str, Any]) -> tuple[str, ...]:
    given = body.get("stop", body.get("stop_sequences")) or []
    found = [given] if isinstance(given, str) else given
    if not isinstance(found, list) or not all(isinstance(one, str) and one for one in found):
        raise mistake("stop or stop_sequences", given, "a text that is not empty, or a list of such")
    return tuple(found)


def text_of(field: str, content: Any) -> str:
    """Text of a message's content, whose parts are joined."""
    if not isinstance(content, str | list | None):
        raise mistake(field, content, "text, or a list of parts")
    try:
        return joined(content, field, TEXT) or ""
    except UserError as error:
        raise RequestRefused(400, REFUSED, str(error)) from error


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
