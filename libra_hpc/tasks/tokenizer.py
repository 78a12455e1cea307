"""The policy's tokenizer for tasks: ``tokenizer.json`` of the model folder, without torch or transformers."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from libra_hpc.errors import invalid

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
