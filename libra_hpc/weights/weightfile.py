"""Checks that safetensors files are the weights they should be: whole, and with the tensors of a model.

Before a job is queued (`libra_hpc.preflight.named_files`), before vLLM starts, and before an engine takes an image.
Headers alone: needs neither torch nor safetensors, which a login environment lacks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from libra_hpc.errors import error_text
from libra_hpc.models.published import Shapes, stored_shapes, text_parts
from libra_hpc.models.supported import in_float32

FLOATS = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}
"""Bytes of an element."""
LENGTH = 8
"""Bytes of the header's length, before the header."""
ALIGNMENT = 8
"""The header is padded with spaces so that data begins at a multiple of it."""
LONGEST_HEADER = 100_000_000
"""Bytes; the limit of the safetensors library."""
METADATA = "__metadata__"
COPY_BYTES = 16 << 20
"""Bytes written at a time, without the interpreter's lock."""
POINTER = b"version "
"""How a pointer of git-lfs begins."""


class WeightFileError(Exception):
    """The file must not be applied; the message is one sentence with the reason."""


class _Tensor(msgspec.Struct):
    """Its entry in a header; offsets count from the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


_header, _tensor = msgspec.json.Decoder(dict[str, msgspec.Raw]), msgspec.json.Decoder(_Tensor)


def tensor_type(name: str, dtype: str) -> str:
    """Type of a tensor of a model whose others are of ``dtype``."""
    return "F32" if in_float32(name) else dtype


def tensor_bytes(shapes: Shapes, dtype: str) -> int:
    """Bytes of all tensors of a model in ``dtype``."""
    return sum(math.prod(shape) * FLOATS[tensor_type(name, dtype)] for name, shape in shapes.items())


def file_header(shapes: Shapes, dtype: str) -> tuple[bytes, dict[str, tuple[int, int]]]:
    """Everything before the first tensor, and between which bytes behind it each tensor of a model in ``dtype`` lies.

    Tensors of wider types come first, so that each begins at a multiple of its elements.
    """
    entries, _ = _entries(shapes, dtype)
    return _header_bytes(entries), {name: entry.data_offsets for name, entry in entries.items()}


def _entries(shapes: Shapes, dtype: str) -> tuple[dict[str, _Tensor], int]:
    """All tensors of a model, and where the last one ends."""
    entries: dict[str, _Tensor] = {}
    end = 0
    types = {name: tensor_type(name, dtype) for name in shapes}
    for name in sorted(shapes, key=lambda name: -FLOATS[types[name]]):
        begin, end = end, end + math.prod(shapes[name]) * FLOATS[types[name]]
        entries[name] = _Tensor(types[name], shapes[name], (begin, end))
    return entries, end


def _header_bytes(entries: Mapping[str, _Tensor]) -> bytes:
    text = msgspec.json.encode({METADATA: {"format": "pt"}, **entries})
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(LENGTH, "little") + text


def file_shapes(path: str | Path) -> dict[str, tuple[int, ...]]:
    """Tensor names and shapes in a safetensors file, from its header.

    Raises `WeightFileError` when the file is not whole, malformed, or holds other than floats.
    """
    return {name: tensor.shape for name, tensor in _tensors(path)[1].items()}


def _tensors(path: str | Path) -> tuple[int, dict[str, _Tensor]]:
    """Where the first tensor begins, and all of them."""
    try:
        with open(path, "rb") as file:
            start = file.read(LENGTH)
            length = int.from_bytes(start, "little")
            header = file.read(length) if length <= LONGEST_HEADER else b""
            size = file.seek(0, 2)
    except OSError as error:
        raise WeightFileError(f"{path}: {error_text(error)}.") from error
    if not size:
        raise WeightFileError(f"{path}: the file is empty.")
    if start == POINTER:
        raise WeightFileError(f"{path}: a pointer of git-lfs, not the weights; `git lfs pull` brings them.")
    try:
        entries = _header.decode(header)
        entries.pop(METADATA, None)
        tensors = {name: _tensor.decode(entry) for name, entry in entries.items()}
    except (ValueError, RecursionError) as error:
        why = f"its {size:,} bytes end within its header" if LENGTH + length > size else error_text(error)
        raise WeightFileError(f"{path}: no whole safetensors file ({why}).") from error
    end = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].data_offsets):
        if tensor.dtype not in FLOATS:
            raise WeightFileError(f"{path}: {name} has type {tensor.dtype}, not a floating-point type.")
        begin, end_before = tensor.data_offsets[0], end
        end = begin + math.prod(tensor.shape) * FLOATS[tensor.dtype]
        if begin != end_before or end != tensor.data_offsets[1]:
            raise WeightFileError(f"{path}: its header gives {name} other bytes than its shape needs.")
    if (whole := LENGTH + length + end) != size:
        raise WeightFileError(f"{path}: it has {size:,} bytes, and {whole:,} by its header.")
    return LENGTH + length, tensors


class Wrapped(NamedTuple):
    """What stands before and behind the tensors of a text model in the one file of its wrapper."""

    header: bytes
    """Empty: the model is no wrapper's."""
    places: Sequence[tuple[Path, int, int]]
    """Bytes of files that follow: the other parts, as they came."""

    def others(self) -> Iterator[memoryview]:
        for path, begin, end in self.places:
            with path.open("rb") as file:
                file.seek(begin)
                for at in range(begin, end, COPY_BYTES):
                    yield memoryview(file.read(min(COPY_BYTES, end - at)))


PLAIN = Wrapped(b"", ())


def wrapped_file(folder: Path, model: Shapes, dtype: str) -> Wrapped:
    """The text model's tensors get the names that they have in the files of ``folder``; raises `WeightFileError`."""
    found: dict[str, tuple[int, ...]] = {}
    others: dict[str, tuple[_Tensor, Path, int]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        # Mistral's folders have a second copy of the weights.
        if path.name.startswith("consolidated"):
            continue
        begin, tensors = _tensors(path)
        for name, tensor in tensors.items():
            if text_parts(name, (1,)):
                found[name] = tensor.shape
            else:
                others[name] = tensor, path, begin
    entries, end = _entries(stored_shapes(found, model), dtype)
    places = []
    for name, (tensor, path, begin) in others.items():
        low, high = tensor.data_offsets
        places.append((path, begin + low, begin + high))
        entries[name] = _Tensor(tensor.dtype, tensor.shape, (end, end + high - low))
        end += high - low
    return Wrapped(_header_bytes(entries), places)


def folder_shapes(folder: str | Path) -> dict[str, tuple[int, ...]]:
    """Tensor names and shapes of all ``*.safetensors`` of a model folder; raises `WeightFileError`."""
    out: dict[str, tuple[int, ...]] = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        out |= file_shapes(path)
    return out
