"""Headers of weight files; those that cannot be the policy's are rows of `tests.cli.mistake_rows`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from libra_hpc.errors import UserError
from libra_hpc.models.architecture import hf_shapes, read_shape
from libra_hpc.preflight.named_files import check_weights
from libra_hpc.trainer.saved.checkpoint import TensorFiles
from libra_hpc.weights.image import write_pinned
from libra_hpc.weights.safetensors_writer import write_safetensors
from libra_hpc.weights.weightfile import folder_shapes, wrapped_file
from tests.trainer.support import make_model

from .test_checks import MODEL, write_model, write_weights


def test_a_tied_head_may_be_there_or_not(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", {**MODEL, "tie_word_embeddings": True})
    check_weights(str(folder))
    shapes = hf_shapes(read_shape(folder))
    write_weights(folder / "model.safetensors", {**shapes, "lm_head.weight": (128, 64)})
    check_weights(str(folder))
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x3f")
    with pytest.raises(UserError, match=r"not model\.embed_tokens\.weight, .*; valid: tie_word_embeddings = false"):
        check_weights(str(folder))


@pytest.mark.parametrize(
    ("kind", "more"), [("glm4_moe", "model.layers.6.eh_proj.weight"), ("qwen3_next", "mtp.fc.weight")]
)
def test_layers_beyond_the_last_predict_several_tokens_and_are_left_out(tmp_path: Path, kind: str, more: str) -> None:
    keys = {"model_type": kind, "moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2}
    folder = write_model(tmp_path / "model", {**MODEL, **keys})
    shapes = hf_shapes(read_shape(folder))
    write_weights(folder / "model.safetensors", {**shapes, more: (64, 128)})
    check_weights(str(folder))
    write_weights(folder / "model.safetensors", {**shapes, "model.layers.5.eh_proj.weight": (64, 128)})
    with pytest.raises(UserError, match=r"1 tensors are not the model's: model\.layers\.5\.eh_proj"):
        check_weights(str(folder))


def test_a_wrappers_language_model_is_checked_and_its_checkpoint_has_the_other_parts(tmp_path: Path) -> None:
    reference = make_model("qwen3_5_moe", tmp_path / "model")
    file, shape = tmp_path / "model" / "model.safetensors", read_shape(tmp_path / "model")
    check_weights(str(file.parent))
    with TensorFiles(file, shape.wrapper) as files:
        want = {name: files(name) for name in hf_shapes(shape)}
    # transformers writes each expert, and what is published has all in one tensor, as its models have.
    save_file(reference.state_dict(), file)
    check_weights(str(file.parent))
    with TensorFiles(file, shape.wrapper) as files:
        pairs = [(name, files(name)) for name in hf_shapes(shape)]
        assert all(torch.equal(tensor, want[name]) for name, tensor in pairs)
        write_safetensors(tmp_path / "image", torch.float32, hf_shapes(shape), pairs)
    with (tmp_path / "image").open("rb") as copy:
        write_pinned(copy, tmp_path / "policy", wrapped_file(file.parent, hf_shapes(shape), "F32"))
    before, after = load_file(file), load_file(tmp_path / "policy")
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    del before["model.language_model.layers.1.mlp.experts.down_proj"]
    save_file(before, file)
    with pytest.raises(UserError, match=r"8 tensors are missing: model\.layers\.1\.mlp\.experts\.0\.down_proj"):
        check_weights(str(file.parent))


def test_headers_are_read_as_the_library_reads_them(tmp_path: Path) -> None:
    tensors = {"a": torch.ones(2, 3), "b": torch.zeros(0, 4), "c": torch.tensor(1.0)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    read = {name: tuple(tensor.shape) for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    assert folder_shapes(tmp_path) == read
