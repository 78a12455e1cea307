"""One request of an agent and its answer, whatever API it speaks; bodies are read by `apis`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec

from libra_hpc.chat.dialects import Reply, message_call
from libra_hpc.tasks.chat_template import Message


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


def identity(message: Message) -> Any:
    """What makes two messages the same. On its way the policy's text may have lost white space around it, and a number
    of its arguments a ``.0``: to JavaScript both are one number."""
    text, calls = message.get("content") or "", message.get("tool_calls") or ()
    if message["role"] == "assistant":
        text = text.strip()
    called = [(one["function"]["name"], one["function"]["arguments"], one.get("id")) for one in calls]
    return message["role"], text, called, message.get("tool_call_id") or ""


def answer_of(reply: Reply, identity: str, prompt: int, sampled: Sequence[int], cut: bool) -> Answer:
    """The answer that shows a turn. A call that cannot be read is text: its agent answers it as it likes."""
    good = [one for one in reply.calls if not one.error and isinstance(one.arguments, dict)]
    bad = "".join(one.raw for one in reply.calls if one not in good)
    calls = tuple(
        AnsweredCall(f"call_{identity}_{number}", one.name, json.dumps(one.arguments))
        for number, one in enumerate(good)
    )
    return Answer(identity, reply.text + bad, reply.thinking, calls, cut, prompt, len(sampled))
