"""Checks that a file is the weights it should be, completely before vLLM changes a parameter.

vLLM cannot undo a half-applied update, so everything is checked before:

- the checksum of the whole file;
- that the safetensors header covers it exactly;
- that names and shapes are those of the model folder the engine was started from.

`check_weight_file` spends its time outside the interpreter lock: run it in a thread while the engine generates.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open

from .checksum import file_crc32

TIED_HEAD = "lm_head.weight"
"""With tied embeddings a file may have or omit the output head: it is the embedding."""
FLOATS = frozenset({"F64", "F32", "BF16", "F16"})
NAMED = 3
"""Most tensor names quoted in one error message."""

Shapes = Mapping[str, tuple[int, ...]]


class WeightFileError(Exception):
    """The file must not be applied; the message is one sentence with the reason."""


def file_shapes(path: str | Path) -> dict[str, tuple[int, ...]]:
    """Tensor names and shapes in a safetensors file.

    Raises `WeightFileError` when it is truncated, malformed, or holds other than floats.
    """
    out: dict[str, tuple[int, ...]] = {}
    try:
        with safe_open(str(path), framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                tensor = file.get_slice(name)
                if tensor.get_dtype() not in FLOATS:
                    raise WeightFileError(f"{path}: {name} has type {tensor.get_dtype()}, not a floating-point type.")
                out[name] = tuple(tensor.get_shape())
    except (SafetensorError, OSError) as error:
        raise WeightFileError(f"{path}: not a complete safetensors file ({error}).") from error
    return out


def folder_shapes(folder: str | Path) -> dict[str, tuple[int, ...]]:
    """Tensor names and shapes of all ``*.safetensors`` of a model folder."""
    out: dict[str, tuple[int, ...]] = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        out |= file_shapes(path)
    return out


def check_weight_file(path: str, crc32: int, expected: Shapes, tied: bool) -> None:
    """Raise `WeightFileError` unless ``path`` has checksum ``crc32`` and exactly the tensors of ``expected``.

    ``tied``: the model shares input and output embedding, so `TIED_HEAD` may be there or not.
    """
    try:
        found_crc = file_crc32(path)
    except OSError as error:
        raise WeightFileError(f"{path}: {error.strerror}.") from error
    if found_crc != crc32:
        raise WeightFileError(f"{path}: crc32 is {found_crc:#010x}, expected {crc32:#010x}.")
    found = file_shapes(path)
    optional = {TIED_HEAD} if tied else set()
    if missing := sorted(expected.keys() - found.keys() - optional):
        raise WeightFileError(f"{path}: {len(missing)} tensors are missing: {_some(missing)}.")
    if unknown := sorted(found.keys() - expected.keys() - optional):
        raise WeightFileError(f"{path}: {len(unknown)} tensors are not the model's: {_some(unknown)}.")
    if wrong := sorted(name for name in found.keys() & expected.keys() if found[name] != expected[name]):
        first = wrong[0]
        raise WeightFileError(
            f"{path}: {len(wrong)} tensors have a wrong shape: {first} is {list(found[first])}, expected"
            f" {list(expected[first])}."
        )


def _some(names: list[str]) -> str:
    return ", ".join(names[:NAMED]) + (", ..." if len(names) > NAMED else "")
