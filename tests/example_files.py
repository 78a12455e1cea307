"""The example files that tests use as tasks, and tokenizers for them."""

from __future__ import annotations

import json
from pathlib import Path

from tests.chat.chat_folder import chat_tokenizer

EXAMPLES = Path(__file__).parents[1] / "examples"
GUESS = f"{EXAMPLES / 'my_task.py'}:GuessNumber"


def write_text_tokenizer(folder: Path) -> Path:
    """A tokenizer of any text, for tasks that need no token of their own."""
    folder.mkdir(parents=True, exist_ok=True)
    chat_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    return folder
