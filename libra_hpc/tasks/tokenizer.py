"""The policy's tokenizer and chat template for tasks, from its folder, without torch or transformers.

The template renders as in transformers. It cannot see the clock (`strftime_now` is missing): one that writes a date
falls back to its fixed one, so the same messages give the same prompt on every day, and a replay of turns does too.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from libra_hpc.errors import invalid

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


CUT = "\U0010fffe"
"""Stands in text where `TaskTokenizer.encode` cuts it: in a control token's name that is no control token. Unicode
assigns no character to it."""
PIECE = 1 << 16
"""Characters of a piece of a text that may be too long."""
# A pool of threads is of no use for one text at a time.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
SPARSE = 8
"""Characters for each token beyond which a text may be too long: of prose a token has four or five."""


class TaskTokenizer:
    """Text <-> token ids; no special tokens are added or dropped.

    Raises `UserError` when ``folder`` has no readable ``tokenizer.json``.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        """The policy's Hugging Face folder: ``config.json``, ``tokenizer.json``, templates."""
        path = self.folder / "tokenizer.json"
        if not path.is_file():
            raise invalid(
                "model.path", str(folder), "has no tokenizer.json", "a Hugging Face folder with a fast tokenizer"
            )
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the tokenizers library raises bare Exception
            raise invalid(
                "model.path",
                str(folder),
                f"its tokenizer.json cannot be read ({error})",
                "a Hugging Face folder with a fast tokenizer",
            ) from error
        self._config = self._read("tokenizer_config.json")
        self.eos_id = self._special("eos_token")
        """End-of-sequence id; None when the folder has none."""

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Ids that end a generation: `eos_id` and those of ``generation_config.json``."""
        found = self._read("generation_config.json").get("eos_token_id")
        ids = found if isinstance(found, list) else [found]
        return tuple(dict.fromkeys(one for one in (self.eos_id, *ids) if isinstance(one, int)))

    @property
    def added_ids(self) -> dict[int, bool]:
        """Ids of the tokens beside the vocabulary, which no neighbour merges with; True: special."""
        return {one: token.special for one, token in self._tokenizer.get_added_tokens_decoder().items()}

    @property
    def chat_template(self) -> str | None:
        """The policy's Jinja template for messages; None when the folder has none."""
        file = self.folder / "chat_template.jinja"
        if file.is_file():
            return file.read_text(encoding="utf-8")
        found = self._config.get("chat_template")
        if isinstance(found, list):  # several, by name
            found = {one["name"]: one["template"] for one in found}.get("default")
        return found if isinstance(found, str) else None

    @property
    def special_tokens(self) -> dict[str, str]:
        """Text of the special tokens by name (``bos_token``, ...), for templates."""
        found = {name: one.get("content") if isinstance(one, dict) else one for name, one in self._config.items()}
        return {name: text for name, text in found.items() if name.endswith("_token") and isinstance(text, str)}

    def _read(self, name: str) -> dict[str, Any]:
        path = self.folder / name
        try:
            found = json.loads(path.read_bytes()) if path.is_file() else {}
        except (ValueError, RecursionError) as error:
            raise invalid(
                "model.path", str(path), f"is not valid JSON ({error})", "a Hugging Face folder with a fast tokenizer"
            ) from error
        return found if isinstance(found, dict) else {}

    def _special(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self.id_of(token)

    @cached_property
    def longest(self) -> int:
        """Most bytes of JSON that one token stands for: a line's end or a quote has two a byte."""
        return 2 * max(map(len, self._tokenizer.get_vocab()))

    def encode(self, text: str, most: int | None = None) -> list[int]:
        """Ids of ``text``, in which names of control tokens are those tokens, unless `as_text` has cut them. Half a
        surrogate pair, which JSON may have, is a question mark.

        Of a long text those of its first pieces, which may split words, if they are more than twice ``most``.
        """
        if most is not None and len(text) > SPARSE * most:
            begun = list[int]()
            for at in range(0, len(text), PIECE):
                begun += self.encode(text[at : at + PIECE])
                if len(begun) > 2 * most:
                    return begun
        parts = text.encode(errors="replace").decode().split(CUT)
        # It alone lets other threads run meanwhile, and takes an eighth of the memory.
        made = self._tokenizer.encode_batch_fast(parts, add_special_tokens=False)
        return [one for part in made for one in part.ids]

    def as_text(self, text: str) -> str:
        """``text`` for `encode` without control tokens: what stands in a message cannot end it."""
        return self._control.sub(lambda found: found[0][0] + CUT + found[0][1:], text.replace(CUT, ""))

    @cached_property
    def _control(self) -> re.Pattern[str]:
        """Any control token by name, the longest first."""
        found = [self.decode([one]) for one, special in self.added_ids.items() if special or one in self.end_ids]
        names = sorted((re.escape(name) for name in found if len(name) > 1), key=len, reverse=True)
        return re.compile("|".join(names) or r"(?!)")

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ``ids``, special tokens included."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def id_of(self, token: str) -> int | None:
        """Id of one whole token; None when the vocabulary lacks it."""
        found: int | None = self._tokenizer.token_to_id(token)
        return found

    def need(self, token: str) -> int:
        """Id of one whole token; raises `UserError` when the vocabulary lacks it."""
        found = self.id_of(token)
        if found is None:
            raise invalid(
                "model.path",
                token,
                "the model's tokenizer lacks this token, which the task needs",
                "a model made for this task",
            )
        return found

    @property
    def size(self) -> int:
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))
