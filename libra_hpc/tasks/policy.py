"""Tiny policies: tokenizer and Qwen2 model that learn a built-in task in a minute on one CPU core.

Size: 2 layers, hidden 64, 2 heads, feed-forward 256, untied. The warm start is supervised, on new demonstrations in
each step, by the library's Megatron trainer; it is bounded by steps, so a seed always gives the same policy.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from libra_hpc.errors import invalid

from .tokenizer import TaskTokenizer

BATCH = 12
"""Demonstrations per step: many small steps beat few large ones."""

PERFECT_SHARE = 0.6
"""Share of steps with perfect demonstrations, which train copying; the rest are flawed and leave work for RL."""

LR, WARMUP_STEPS = 3e-3, 50
"""Peak rate and warm-up steps of AdamW; the rate is constant to half of the steps, then falls linearly to 0."""

Batch = list[tuple[list[int], list[int]]]
"""Demonstrations: (token ids, mask with 1 on the policy's tokens)."""


@dataclass(frozen=True)
class Recipe:
    tokenizer: Callable[[], Tokenizer]
    special: dict[str, str]
    """Special tokens of ``tokenizer_config.json``; ``eos_token`` ends a turn."""
    model_vocab: int
    """Rows of the embedding: a multiple of 64, which every tensor-parallel degree divides."""
    max_positions: int
    batch: Callable[[TaskTokenizer, int, int, int, bool], Batch]
    """(tokenizer, seed, step, size, flawed) -> demonstrations"""


def _keychain_tokenizer() -> Tokenizer:
    from .keychain import vocabulary

    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary())}, unk_token="<unk>"))
    split = pre_tokenizers.Split
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split(Regex("\n"), "isolated"), split(" ", "removed")])
    return tokenizer


def _keychain_batch(tokenizer: TaskTokenizer, seed: int, step: int, size: int, flawed: bool) -> Batch:
    from .keychain import Words
    from .keychain_demos import demonstration_batch

    return demonstration_batch(Words(tokenizer), seed=seed, step=step, size=size, flawed=flawed)


RECIPES = {
    "keychain": Recipe(
        tokenizer=_keychain_tokenizer,
        special={"pad_token": "<pad>", "bos_token": "<bos>", "unk_token": "<unk>", "eos_token": "\n"},
        model_vocab=128,
        max_positions=4096,
        batch=_keychain_batch,
    )
}


def write_tokenizer(out: str | Path, task: str = "keychain") -> Tokenizer:
    """Write the tokenizer files of a task's tiny policy; raises `UserError` for a task without a recipe."""
    recipe = _recipe(task)
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = recipe.tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": recipe.max_positions,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, **recipe.special}, indent=1))
    return tokenizer


def write_folder(out: str | Path, task: str = "keychain", seed: int = 0) -> int:
    """Write the Hugging Face folder of an untrained tiny policy (fp32); returns its number of parameters.

    Raises `UserError` for a task without a recipe.
    """
    recipe = _recipe(task)
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    tokenizer = write_tokenizer(out, task)
    config = Qwen2Config(
        vocab_size=recipe.model_vocab,
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=recipe.max_positions,
        tie_word_embeddings=False,
        bos_token_id=None if "bos_token" not in recipe.special else tokenizer.token_to_id(recipe.special["bos_token"]),
        eos_token_id=tokenizer.token_to_id(recipe.special["eos_token"]),
        pad_token_id=tokenizer.token_to_id(recipe.special["pad_token"]),
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config)  # type: ignore[no-untyped-call]
    model.save_pretrained(out)
    return sum(parameter.numel() for parameter in model.parameters())


def batches(folder: str | Path, task: str, seed: int, steps: int) -> Iterator[Batch]:
    recipe, tokenizer = _recipe(task), TaskTokenizer(folder)
    for step in range(steps):
        yield recipe.batch(tokenizer, seed, step, BATCH, step >= PERFECT_SHARE * steps)


def make_tiny_policy(out: str, task: str = "keychain", seed: int = 0, steps: int = 2000) -> dict[str, Any]:
    """Make a tiny policy for a built-in task in ``out``, with ``steps`` supervised steps (0: random weights).

    Returns parameters, steps, seconds and final_loss (mean of the last 100 steps, nats per token; NaN for 0 steps).
    Raises `UserError` for a task without a recipe or bad numbers.
    """
    if steps < 0:
        raise invalid("steps", steps, "negative", "an integer >= 0")
    started = time.perf_counter()
    parameters = write_folder(out, task, seed)
    loss = float("nan")
    if steps:
        from libra_hpc.trainer.sft import warm_start

        folder = Path(out)
        demonstrations = batches(folder, task, seed, steps)
        result = warm_start(folder, folder, demonstrations, steps, lr=LR, warmup=min(WARMUP_STEPS, steps // 4))
        loss = result["last_loss"]
    return {"parameters": parameters, "steps": steps, "seconds": time.perf_counter() - started, "final_loss": loss}


def _recipe(task: str) -> Recipe:
    if task not in RECIPES:
        raise invalid("task", task, "no tiny policy can be made for this task", list(RECIPES))
    return RECIPES[task]
