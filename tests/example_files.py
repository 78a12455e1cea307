"""The example files that tests use as tasks, and tokenizers for them."""

from __future__ import annotations

import json
from pathlib import Path

from libra_hpc.tasks.tiny_policy import write_tokenizer
from libra_hpc.user_file import load_file
from tests.chat.chat_folder import chat_tokenizer

EXAMPLES = Path(__file__).parents[1] / "examples"
KEYCHAIN_TASK = f"{EXAMPLES / 'keychain.py'}:KeyChain"
keychain = load_file(EXAMPLES / "keychain.py")
"""The module as hosts import it."""
GUESS = f"{EXAMPLES / 'my_task.py'}:GuessNumber"


def write_text_tokenizer(folder: Path) -> Path:
    """A tokenizer of any text, for tasks that need no token of their own."""
    folder.mkdir(parents=True, exist_ok=True)
    chat_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    return folder


def write_keychain_tokenizer(folder: Path) -> Path:
    """The tokenizer of a tiny policy for the key chain."""
    write_tokenizer(folder, keychain.KeyChain.words)
    return folder
