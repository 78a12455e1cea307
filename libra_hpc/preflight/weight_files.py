"""Checks of the policy's weight files against its config.json, before anything is queued; reads mostly headers.

- The index names a file that is not there -> that file.
- A file is empty, truncated, or a pointer of git-lfs -> that file, with its sizes.
- Tensors are missing, not the model's, or of another shape -> the first of them, and the keys of config.json behind it.
- Embeddings are tied, and the head of the files is not the embedding -> the key that unties them.
"""

from __future__ import annotations

from mmap import ACCESS_READ, mmap
from pathlib import Path

import msgspec

from libra_hpc.config.learn import INITIAL
from libra_hpc.errors import error_text, invalid
from libra_hpc.models.architecture import read_shape
from libra_hpc.models.tensors import TIED_HEAD, hf_shapes, predicts_ahead, tensor_fault
from libra_hpc.weights.weightfile import LENGTH, WeightFileError, folder_shapes

INDEX = "model.safetensors.index.json"
REFERENCE = "algorithm.reference"
EMBEDDING = "model.embed_tokens.weight"
VALID = "a folder whose *.safetensors are the weights of its config.json"


def check_reference(path: str, model: str) -> None:
    """Raise `UserError` unless the folder ``algorithm.reference`` has weights of the shape of ``model``."""
    if not Path(path).is_dir():
        raise invalid(REFERENCE, path, "no such folder", f"{INITIAL}, or {VALID}")
    _check(REFERENCE, path, Path(model))


def check_weights(path: str) -> None:
    """Raise `UserError` unless the weight files of ``model.path`` are whole and those of its config.json."""
    _check("model.path", path, Path(path))


def _check(field: str, path: str, model: Path) -> None:
    """Raise `UserError` unless the weight files of ``path`` are whole and those of the config.json of ``model``."""
    folder = Path(path)
    missing = [name for name in _indexed(field, folder / INDEX) if not (folder / name).is_file()]
    if missing:
        raise invalid(field, path, f"{INDEX} names {missing[0]}, which is not there", VALID)
    try:
        found = folder_shapes(folder)
    except WeightFileError as error:
        raise invalid(field, path, str(error).removeprefix(f"{folder}/").rstrip("."), VALID) from error
    shape = read_shape(model)
    if shape.kind.sigmoid_router or shape.delta_net:
        found = {name: size for name, size in found.items() if not predicts_ahead(name, shape.layers)}
    # A layer has tensors: with more layers than there are tensors some are missing anyway.
    wanted = hf_shapes(msgspec.structs.replace(shape, layers=min(shape.layers, len(found))))
    if fault := tensor_fault(found, wanted, shape.tied_embeddings):
        keys = f"num_hidden_layers = {shape.layers}, hidden_size = {shape.hidden}, vocab_size = {shape.vocab}"
        owner = "its config.json" if model == folder else "the config.json of model.path"
        raise invalid(field, path, f"by {owner} ({keys}) {fault}", VALID)

    if shape.tied_embeddings and TIED_HEAD in found and _data(folder, TIED_HEAD) != _data(folder, EMBEDDING):
        why = f"{TIED_HEAD} is not {EMBEDDING}, and config.json has tie_word_embeddings = true"
        raise invalid(field, path, why, "tie_word_embeddings = false there, if both are to be trained")


def _data(folder: Path, name: str) -> memoryview:
    """The bytes of a tensor that some file of the folder has."""
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            whole = mmap(file.fileno(), 0, access=ACCESS_READ)
        start = LENGTH + int.from_bytes(whole[:LENGTH], "little")
        if entry := msgspec.json.decode(whole[LENGTH:start]).get(name):
            begin, end = entry["data_offsets"]
            return memoryview(whole)[start + begin : start + end]
    raise WeightFileError(f"{folder}: no file has {name}.")


class _Index(msgspec.Struct):
    weight_map: dict[str, str]
    """Tensor -> file."""


def _indexed(field: str, index: Path) -> list[str]:
    """Files that an index names, in order; none without an index. Raises `UserError` for a malformed one."""
    try:
        return sorted(set(msgspec.json.decode(index.read_bytes(), type=_Index).weight_map.values()))
    except FileNotFoundError:
        return []
    except (OSError, ValueError, RecursionError) as error:
        raise invalid(field, str(index.parent), f"its {INDEX} cannot be read ({error_text(error)})") from error
