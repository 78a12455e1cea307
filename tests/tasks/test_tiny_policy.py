"""Making tiny policies: the folder, its tokenizer, the demonstrations' schedule, and a short real warm start."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from libra_hpc_cli.jobs import make_tiny_policy

from libra_hpc.tasks.tiny_policy import BATCH, batches
from libra_hpc.tasks.tokenizer import TaskTokenizer
from tests.example_files import GUESS, KEYCHAIN_TASK, keychain


def test_a_task_without_words_has_no_tiny_policy(tmp_path: Path) -> None:
    made = make_tiny_policy(str(tmp_path / "policy"), GUESS)
    assert made["error"].startswith(f"--task = {GUESS!r}: no tiny policy can be made for this task; valid: a ")
    assert list(tmp_path.iterdir()) == []


def test_demonstrations_are_perfect_first_and_flawed_last(keychain_folder: Path) -> None:
    tokenizer = TaskTokenizer(keychain_folder)
    value = tokenizer.need("val")
    order = list(batches(keychain_folder, keychain.KeyChain, 0, 20))
    solved = [sum(value in tokens for tokens, _ in batch) for batch in order]
    assert [len(batch) for batch in order] == [BATCH] * 20
    assert solved[:12] == [BATCH] * 12
    assert all(count < BATCH for count in solved[12:])
    again, other = (next(batches(keychain_folder, keychain.KeyChain, seed, 20)) for seed in (0, 1))
    assert order[0] == again != other


@pytest.mark.engine
def test_warm_start_through_the_trainer(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    seeds = {"a": 0, "b": 0, "c": 1}
    raw = {
        name: make_tiny_policy(str(tmp_path / name), KEYCHAIN_TASK, seed=seed, steps=0) for name, seed in seeds.items()
    }
    assert {report["parameters"] for report in raw.values()} == {148160}
    assert math.isnan(raw["a"]["final_loss"])
    a, b, c = (load_file(tmp_path / name / "model.safetensors") for name in "abc")
    key = "model.layers.0.mlp.up_proj.weight"
    assert (a[key] == b[key]).all()
    assert (a[key] != c[key]).any()
    report = make_tiny_policy(str(tmp_path / "warm"), KEYCHAIN_TASK, steps=40)
    assert report["steps"] == 40
    # The loss of a uniform guess, less what 40 steps teach at the least.
    assert report["final_loss"] < math.log(128) - 0.5
    warm = load_file(tmp_path / "warm" / "model.safetensors")
    assert {name: tensor.shape for name, tensor in warm.items()} == {name: tensor.shape for name, tensor in a.items()}
    assert (warm[key] != a[key]).any()
    config = json.loads((tmp_path / "warm" / "config.json").read_text())
    assert (config["vocab_size"], config["tie_word_embeddings"]) == (128, False)
    assert config["architectures"] == ["Qwen2ForCausalLM"]
    assert TaskTokenizer(tmp_path / "warm").size == 111
