"""The APIs that an agent may speak, by their paths: one module each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from . import anthropic_messages, chat_completions, responses
from .agent_request import AgentRequest, Answer, Histories, RequestRefused


class Api(Protocol):
    """How bodies are read, answered and streamed; ``LAST``: data of a stream's last event, empty for none."""

    LAST: str

    def read(self, body: Mapping[str, Any], before: Histories) -> AgentRequest:
        """Raises `RequestRefused` naming the field."""

    def answer(self, asked: AgentRequest, made: Answer) -> dict[str, Any]: ...

    def events(self, asked: AgentRequest, made: Answer) -> Iterator[tuple[str, dict[str, Any]]]:
        """Names of server-sent events, empty for one without, and their data."""

    def error(self, why: RequestRefused) -> dict[str, Any]: ...


COUNT_PATH = "/v1/messages/count_tokens"
"""Answers with the tokens of the context that a turn would have, without one."""
APIS: dict[str, Api] = {
    "/v1/chat/completions": chat_completions,
    "/v1/responses": responses,
    "/v1/messages": anthropic_messages,
    COUNT_PATH: anthropic_messages,
}
