"""The policy's tokenizer for tasks: ``tokenizer.json`` of the model folder, without torch or transformers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from libra_hpc.errors import invalid


class TaskTokenizer:
    """Text <-> token ids; no special tokens are added or dropped.

    Raises `UserError` when ``folder`` has no readable ``tokenizer.json``.
    """

    def __init__(self, folder: str | Path) -> None:
        path = Path(folder) / "tokenizer.json"
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
        self.eos_id = self._special(Path(folder) / "tokenizer_config.json", "eos_token")
        """End-of-sequence id; None when the folder has none."""

    def _special(self, config: Path, name: str) -> int | None:
        if not config.is_file():
            return None
        try:
            found = json.loads(config.read_bytes())
        except (ValueError, RecursionError) as error:
            raise invalid(
                "model.path", str(config), f"is not valid JSON ({error})", "a Hugging Face folder with a fast tokenizer"
            ) from error
        token = found.get(name) if isinstance(found, dict) else None
        if isinstance(token, dict):
            token = token.get("content")
        return self.id_of(token) if isinstance(token, str) else None

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

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
