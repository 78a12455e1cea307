"""Write a safetensors file tensor by tensor, straight from where the tensors are.

safetensors' own ``save_file`` needs all tensors on the host and copies each again; gathering them on the device takes
the memory of a second copy of the weights.  The format is filled in place: the length of the header (8 bytes), the
header (JSON: type, shape and place of every tensor), the data.

Source: the format's description, https://github.com/huggingface/safetensors.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from .weightfile import file_header

TYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


def write_safetensors(
    path: Path,
    dtype: torch.dtype,
    shapes: Mapping[str, tuple[int, ...]],
    tensors: Iterable[tuple[str, torch.Tensor]],
    header: bytes = b"",
) -> None:
    """Write ``path`` with one tensor in memory at a time.

    ``tensors`` yields each name of ``shapes`` once, in any order, with the types of a model in ``dtype``;
    ``header``: the same ones under other names.  Raises `OSError` when the file system has no room for the file.
    """
    own, places = file_header(shapes, TYPES[dtype])
    header = header or own
    begin = len(header)
    end = max((end for _, end in places.values()), default=0)
    with path.open("w+b") as file:
        # Writing to a mapped page that a full file system cannot give would kill the process.
        os.posix_fallocate(file.fileno(), 0, begin + end)
        with mmap.mmap(file.fileno(), begin + end) as mapped:
            mapped[:begin] = header
            for name, tensor in tensors:
                low, high = places[name]
                _fill(mapped, begin + low, high - low, tensor)


def _fill(mapped: mmap.mmap, offset: int, size: int, tensor: torch.Tensor) -> None:
    if size:
        # The view must be gone before the mapping can be closed, so it lives in this function alone.
        view = torch.frombuffer(mapped, dtype=torch.uint8, count=size, offset=offset)
        view.copy_(tensor.detach().contiguous().reshape(-1).view(torch.uint8))
