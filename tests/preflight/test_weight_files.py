"""Weight files that cannot be those of the policy are refused by their headers."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from libra_hpc.errors import UserError
from libra_hpc.models.architecture import read_shape
from libra_hpc.models.tensors import hf_shapes
from libra_hpc.preflight.weight_files import INDEX, check_weights
from libra_hpc.weights.weightfile import folder_shapes

from .test_checks import MODEL, write_model, write_weights

Damage = Callable[[Path], object]


def configure(**changes: Any) -> Damage:
    """Another config.json beside the same weights."""
    return lambda folder: (folder / "config.json").write_text(json.dumps({**MODEL, **changes}))


def weights(content: bytes) -> Damage:
    return lambda folder: (folder / "model.safetensors").write_bytes(content)


def cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    os.truncate(path, path.stat().st_size - 1000)


def cut_header(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", 100)


def index(text: str) -> Damage:
    return lambda folder: (folder / INDEX).write_text(text)


def other_type(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"BF16"', b'"F8_E"', 1))


def longer_tensor(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"shape": [128, 64]', b'"shape": [228, 64]', 1))


def foreign(folder: Path) -> None:
    write_weights(folder / "consolidated.safetensors", {"tok_embeddings.weight": (128, 64)})


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 3945426872\n"
CASES: dict[str, tuple[Damage, str]] = {
    "empty": (weights(b""), "model.safetensors: the file is empty"),
    "a pointer of git-lfs": (weights(POINTER), "a pointer of git-lfs, not the weights; `git lfs pull` brings them"),
    "truncated": (cut, "bytes, and "),
    "truncated in its header": (cut_header, "no whole safetensors file (its 100 bytes end within its header)"),
    "no safetensors": (weights(b"PK\x03\x04" + bytes(5000)), "no whole safetensors file"),
    "a nested header": (weights(b"\x40\x0d\x03\x00\x00\x00\x00\x00" + b"[" * 200_000), "no whole safetensors file"),
    "quantised": (other_type, "has type F8_E, not a floating-point type"),
    "bytes that do not fit": (longer_tensor, "other bytes than its shape needs"),
    "an index of absent files": (
        index('{"weight_map": {"a": "model-00001-of-00002.safetensors"}}'),
        f"{INDEX} names model-00001-of-00002.safetensors, which is not there",
    ),
    "an index that is no index": (index('{"weight_map": {"a": 1}}'), f"its {INDEX} cannot be read"),
    "another vocabulary": (configure(vocab_size=256), "vocab_size = 256) 2 tensors have a wrong shape: "),
    "more layers": (configure(num_hidden_layers=8), "num_hidden_layers = 8, "),
    "fewer layers": (configure(num_hidden_layers=4), "tensors are not the model's: model.layers.4."),
    "another family": (configure(model_type="llama"), "tensors are not the model's: "),
    "a second set of weights": (foreign, "1 tensors are not the model's: tok_embeddings.weight"),
}


@pytest.mark.parametrize(("damage", "sentence"), CASES.values(), ids=CASES)
def test_weights_that_are_not_those_of_the_model(damage: Damage, sentence: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    check_weights(str(folder))
    damage(folder)
    with pytest.raises(UserError) as refused:
        check_weights(str(folder))
    assert sentence in str(refused.value)
    assert str(refused.value).startswith(f"model.path = '{folder}': ")


def test_a_tied_head_may_be_there_or_not(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", {**MODEL, "tie_word_embeddings": True})
    check_weights(str(folder))
    shapes = hf_shapes(read_shape(folder))
    write_weights(folder / "model.safetensors", {**shapes, "lm_head.weight": (128, 64)})
    check_weights(str(folder))


def test_headers_are_read_as_the_library_reads_them(tmp_path: Path) -> None:
    tensors = {"a": torch.ones(2, 3), "b": torch.zeros(0, 4), "c": torch.tensor(1.0)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    read = {name: tuple(tensor.shape) for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    assert folder_shapes(tmp_path) == read
