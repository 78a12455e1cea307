"""The policy's own chat template: from messages to text, as transformers renders it, without transformers.

A template cannot see the clock (`strftime_now` is missing): one that writes a date falls back to its fixed one, so the
same messages give the same prompt on every day, and a replay of turns does too.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from libra_hpc.errors import invalid

from .tokenizer import TaskTokenizer

Message = dict[str, Any]
"""One message in OpenAI's form: ``role``, ``content``, and what ``assistant`` and ``tool`` have besides."""


class _Generation(Extension):
    """``{% generation %}`` marks the assistant's part for training; it renders as its content."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A compiled template; raises `UserError` when the folder has none, or a broken one."""

    def __init__(self, tokenizer: TaskTokenizer) -> None:
        text = tokenizer.chat_template
        self._folder, self._special, self._as_text = str(tokenizer.folder), tokenizer.special_tokens, tokenizer.as_text
        if text is None:
            valid = "an instruct model, with chat_template.jinja or a chat_template in tokenizer_config.json"
            raise invalid("model.path", self._folder, "the model has no chat template, which the task needs", valid)
        self.digest = hashlib.sha256(text.encode()).hexdigest()
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _json
        environment.globals["raise_exception"] = _refuse
        try:
            self._template = environment.from_string(text)
        except TemplateError as error:
            raise invalid("model.path", self._folder, f"its chat template does not compile ({error})") from error

    def render(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = (), *, generate: bool = True
    ) -> str:
        """Text of ``messages``; ``generate`` adds the start of the assistant's next turn. Raises `UserError`.

        What stands in messages is text: `TaskTokenizer.encode` makes no control token of it.
        """
        if not messages or not all(isinstance(one, dict) and isinstance(one.get("role"), str) for one in messages):
            raise invalid("messages", messages, "no conversation", "a list of messages with role and content")
        try:
            written = [
                self._plain(one | ({"content": joined(one["content"])} if "content" in one else {})) for one in messages
            ]
            return self._template.render(
                messages=written, tools=list(tools) or None, add_generation_prompt=generate, **self._special
            )
        except (TemplateError, TypeError, ValueError, RecursionError) as error:
            why = f"its chat template refuses these messages ({type(error).__name__}: {error})"
            raise invalid("model.path", self._folder, why) from error

    def _plain(self, value: Any) -> Any:
        """``value`` with all its text cut where it names control tokens."""
        if isinstance(value, str):
            return self._as_text(value)
        if isinstance(value, dict):
            return {name: self._plain(one) for name, one in value.items()}
        return [self._plain(one) for one in value] if isinstance(value, list | tuple) else value


def joined(content: Any, field: str = "content", kinds: Sequence[str] = ("text",)) -> Any:
    """Content of a message, whose text parts are joined; raises `UserError` for an image or another part.

    ``field``: its name in the error; ``kinds``: types of parts that are text.
    """
    if not isinstance(content, list):
        return content
    for place, one in enumerate(content):
        kind = one.get("type") if isinstance(one, dict) else type(one).__name__
        if kind not in kinds:
            raise invalid(f"{field}[{place}].type", str(kind), "a part that the policy cannot read", ["text"])
    return "".join(str(one.get("text", "")) for one in content)


def _json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """JSON as transformers writes it: jinja's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)
