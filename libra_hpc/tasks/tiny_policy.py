"""Tiny policies: tokenizer and Qwen2 model that learn a task of few words in a minute on one CPU core.

A task class that has one (`examples/keychain.py`) has two attributes:

- ``words``: what it and the policy write beside `SPECIAL`, one token each.
- ``demonstrations(tokenizer, seed, step, size, flawed)``: a batch of episodes for the warm start.

Size: 2 layers, hidden 64, 2 heads, feed-forward 256, untied.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from libra_hpc.errors import invalid

from .base import task_class
from .tokenizer import TaskTokenizer

BATCH = 12
"""Demonstrations per step: many small steps beat few large ones."""

PERFECT_SHARE = 0.6
"""Share of steps with perfect demonstrations, which train copying; the rest are flawed and leave work for RL."""

SPECIAL = {"pad_token": "<pad>", "bos_token": "<bos>", "unk_token": "<unk>", "eos_token": "\n"}
"""Special tokens of ``tokenizer_config.json``, which have the first ids; a line break ends a turn."""

MAX_POSITIONS = 4096

Batch = list[tuple[list[int], list[int]]]
"""Demonstrations: (token ids, mask with 1 on the policy's tokens)."""


def learnable(field: str, task: str) -> Any:
    """The task class of that name; raises `UserError` unless a tiny policy can be made for it."""
    found = task_class(task)
    if not (hasattr(found, "words") and hasattr(found, "demonstrations")):
        valid = "a class with `words` and `demonstrations`, as in examples/keychain.py"
        raise invalid(field, task, "no tiny policy can be made for this task", valid)
    return found


def write_tokenizer(out: str | Path, words: Sequence[str]) -> None:
    """Write the tokenizer files of a tiny policy."""
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    ids = {word: i for i, word in enumerate((*SPECIAL.values(), *words))}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=SPECIAL["unk_token"]))
    split = pre_tokenizers.Split
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split(Regex("\n"), "isolated"), split(" ", "removed")])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": MAX_POSITIONS,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, **SPECIAL}, indent=1))


def write_folder(out: str | Path, words: Sequence[str], seed: int = 0) -> int:
    """Write the Hugging Face folder of an untrained tiny policy (fp32); returns its number of parameters."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    write_tokenizer(out, words)
    config = Qwen2Config(
        # Every tensor-parallel degree divides a multiple of 64.
        vocab_size=-(-(len(SPECIAL) + len(words)) // 64) * 64,
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=False,
        # Places in `SPECIAL`.
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=3,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config)  # type: ignore[no-untyped-call]
    model.save_pretrained(out)
    return sum(parameter.numel() for parameter in model.parameters())


def batches(folder: str | Path, task: Any, seed: int, steps: int) -> Iterator[Batch]:
    """Demonstrations of a `learnable` class for a warm start of ``steps`` steps."""
    tokenizer = TaskTokenizer(folder)
    for step in range(steps):
        yield task.demonstrations(tokenizer, seed, step, BATCH, step >= PERFECT_SHARE * steps)
