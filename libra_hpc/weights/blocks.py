"""Which elements of which Hugging Face tensors lie where, in a trainer's shard and in an engine's parameter: pure.

Everything is a `Slice`: a rectangle of a tensor, and its place in a flattened parameter of one process.

- Trainer: `own_slices` for the parameters of one rank, `within` for the part that its optimizer owns; `from_hf` and
  `to_hf` copy by them, also gradients and moments. ``linear_qkv`` interleaves per query group: its q heads, its k head,
  its v head. Ranks have equal shares of these rows, so with fewer groups than ranks a cut may go through a head.
  ``linear_fc1`` holds gate and up halves *per tensor-parallel rank*.
- Engine: `engine_slices` for the parameters of one vLLM rank, which fuses q, k and v, gate and up, and experts.

A rectangle has the tensor's width as its stride, and a tensor of one dimension is one row.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch

from libra_hpc.models.architecture import Architecture, Entry, hf_shapes
from libra_hpc.models.published import Shapes
from libra_hpc.models.shapes import FUSED

from .names import ReplicaPlace, cut, own_entries, sections
from .pieces import TensorBlock, elements

PADDED_TO = 64
"""vLLM's vocabulary has a multiple of as many rows; those beyond the tensor's are zero."""

ENGINE_STACKED = {
    "gate_up_proj": "w13_weight",
    "gate_up_proj_bias": "w13_bias",
    "down_proj": "w2_weight",
    "down_proj_bias": "w2_bias",
}
"""vLLM's names of stacked experts."""
ENGINE_NETS = {"in_proj_qkv": FUSED[0], "in_proj_z": FUSED[0], "in_proj_b": FUSED[1], "in_proj_a": FUSED[1]}
"""vLLM's names of projections of gated delta nets."""
ENGINE_RENAMED = {".self_attn.": ".attn.", ".embed_tokens.": ".embedding."}
"""Parts of names that vLLM replaces in models with stacked experts."""


class Slice(NamedTuple):
    """Element (r, c) of ``block`` is at ``offset + r * stride + c`` of the flattened ``parameter``."""

    block: TensorBlock
    parameter: str
    offset: int
    stride: int


class _Rows(NamedTuple):
    """Columns of some rows of a tensor, which are a parameter's rows from ``to`` on."""

    tensor: str
    begin: int
    end: int
    to: int
    left: int = 0
    right: int | None = None
    """None: all columns."""


def own_slices(shape: Architecture, place: ReplicaPlace) -> dict[str, list[Slice]]:
    """By Megatron-Core parameter of this rank, in the order of its elements; none for what others offer.

    Replicated parameters are those of tensor rank 0; the last stage's copy of a tied embedding is its original's.
    """
    sizes = hf_shapes(shape)
    return {
        name: _part(name, entry, shape, cut(entry, place), sizes)
        for name, entry in own_entries(shape, place).items()
        if not entry.copy and (entry.expert is not None or entry.dim is not None or not place.tp_rank)
    }


def _part(name: str, entry: Entry, shape: Architecture, own: tuple[int, int], sizes: Shapes) -> list[Slice]:
    """Slices of a part of a parameter; ``own``: of how many, and which one, as `cut` has them."""
    shapes = {one: _matrix(sizes[one]) for one in entry.hf}
    return _slices(name, _trained_rows(entry, shape, own, shapes), shapes)


def _matrix(size: tuple[int, ...]) -> tuple[int, ...]:
    """A tensor of three dimensions has the rows of all its matrices."""
    return size if len(size) < 3 else (math.prod(size[:-1]), size[-1])


def from_hf(entry: Entry, get: Callable[[str], torch.Tensor], shape: Architecture, place: ReplicaPlace) -> torch.Tensor:
    """This rank's part of a parameter; ``get`` returns a full Hugging Face tensor by name."""
    files, own = {name: get(name) for name in entry.hf}, cut(entry, place)
    first = files[entry.hf[0]]
    if own == (1, 0) and entry.layout == "plain":
        return first
    slices = _part("", entry, shape, own, {name: tuple(file.shape) for name, file in files.items()})
    out = first.new_empty(sum(elements(one.block) for one in slices))
    for one in slices:
        _there(out, one).copy_(_view(files[one.block.tensor], one.block))
    return out.view((len(first), -1) if entry.dim == 1 and entry.layout == "plain" else (-1, *first.shape[1:]))


def to_hf(entry: Entry, parts: list[torch.Tensor], shape: Architecture, sizes: Shapes) -> list[torch.Tensor]:
    """Full Hugging Face tensors, in the order of ``entry.hf``, from the parts of all ranks that share the parameter.

    They are fresh, contiguous memory.
    """
    out = {name: parts[0].new_empty(sizes[name]) for name in entry.hf}
    parts = parts if entry.dim is not None else parts[:1]
    for number, part in enumerate(parts):
        for one in _part("", entry, shape, (len(parts), number), sizes):
            _view(out[one.block.tensor], one.block).copy_(_there(part, one))
    return list(out.values())


def _view(tensor: torch.Tensor, block: TensorBlock) -> torch.Tensor:
    return _strided(tensor, block, block.offset, block.stride)


def _there(part: torch.Tensor, one: Slice) -> torch.Tensor:
    return _strided(part, one.block, one.offset, one.stride)


def _strided(tensor: torch.Tensor, block: TensorBlock, offset: int, stride: int) -> torch.Tensor:
    flat = tensor.reshape(-1)
    return flat.as_strided((block.rows, block.cols), (stride, 1), flat.storage_offset() + offset)


def within(slices: Iterable[Slice], begin: int, end: int) -> list[Slice]:
    """What of a parameter's slices lies in its elements ``begin:end``; offsets count from ``begin``.

    An end in the middle of a row makes up to three slices of one.
    """
    out = []
    for (tensor, offset, rows, cols, width), parameter, at, _ in slices:
        low, high = max(begin, at) - at, min(end, at + rows * cols) - at
        while low < high:
            row, left = divmod(low, cols)
            whole = (high - low) // cols if not left else 0
            count = whole * cols or min(high - low, cols - left)
            block = TensorBlock(tensor, offset + row * width + left, whole or 1, cols if whole else count, width)
            out.append(Slice(block, parameter, at + low - begin, block.cols))
            low += count
    return out


def engine_slices(shape: Architecture, tp: int, rank: int) -> dict[str, list[Slice]]:
    """By Hugging Face tensor: where each of its elements that this tensor-parallel rank of vLLM has lies.

    With fewer key/value heads than ranks several ranks have the same head.
    """
    shapes = {name: _matrix(size) for name, size in hf_shapes(shape).items()}
    out: dict[str, list[Slice]] = defaultdict(list)
    for entry in own_entries(shape, ReplicaPlace(tp=1, tp_rank=0, pp=1, pp_rank=0)).values():
        parameter, rows, base = _engine_rows(entry, shape, tp, rank, shapes)
        for ours, theirs in ENGINE_RENAMED.items() if shape.stacked_experts else ():
            parameter = parameter.replace(ours, theirs)
        for one in _slices(parameter, rows, shapes, base):
            out[one.block.tensor].append(one)
    return dict(out)


def _slices(parameter: str, rows: Iterable[_Rows], shapes: Shapes, base: int = 0) -> list[Slice]:
    """``base``: element of the parameter where its rows begin."""
    out = []
    for tensor, begin, end, to, left, right in rows:
        if end <= begin:
            continue
        size = shapes[tensor]
        if len(size) == 1:
            count = end - begin
            out.append(Slice(TensorBlock(tensor, begin, 1, count, size[0]), parameter, base + to, count))
        else:
            cols = (size[1] if right is None else right) - left
            block = TensorBlock(tensor, begin * size[1] + left, end - begin, cols, size[1])
            out.append(Slice(block, parameter, base + to * cols, cols))
    return out


def _span(count: int, parts: int, part: int) -> tuple[int, int]:
    each = count // parts
    return part * each, (part + 1) * each


def _trained_rows(entry: Entry, shape: Architecture, own: tuple[int, int], shapes: Shapes) -> Iterator[_Rows]:
    first, (parts, part) = shapes[entry.hf[0]], own
    if entry.layout == "gated":
        ffn = first[0] // (3 - len(entry.hf))
        begin, end = _span(ffn, parts, part)
        for half, (tensor, at) in enumerate(_halves(entry, ffn)):
            yield _Rows(tensor, at + begin, at + end, half * (end - begin))
    elif entry.layout == "qkv":
        yield from _groups(entry, shape, parts, part)
    elif entry.layout == "sections":
        yield from _each_cut(entry.hf[0], sections(entry, shape), parts, part)
    elif entry.dim == 1:
        yield _Rows(entry.hf[0], 0, first[0], 0, *_span(first[1], parts, part))
    else:
        yield _Rows(entry.hf[0], *_span(first[0], parts, part), 0)


def _each_cut(tensor: str, sections: Iterable[int], parts: int, part: int, to: int = 0) -> Iterator[_Rows]:
    """A rank's rows of each section of a tensor, one after the other."""
    at = 0
    for count in sections:
        begin, end = _span(count, parts, part)
        yield _Rows(tensor, at + begin, at + end, to)
        to, at = to + end - begin, at + count


def _halves(entry: Entry, ffn: int) -> Iterator[tuple[str, int]]:
    """Tensor and first row of gate and of up."""
    yield entry.hf[0], 0
    yield entry.hf[-1], ffn if len(entry.hf) == 1 else 0


def _heads(entry: Entry, shape: Architecture) -> Iterator[tuple[str, int, int]]:
    """Tensor, first row and rows a group of q, k and v."""
    q, kv = shape.group_rows, shape.head_dim
    at = 0
    for i, rows in enumerate((q, kv, kv)):
        yield entry.hf[i if len(entry.hf) > 1 else 0], at if len(entry.hf) == 1 else 0, rows
        at += rows * shape.kv_heads


def _groups(entry: Entry, shape: Architecture, parts: int, part: int) -> Iterator[_Rows]:
    """Megatron-Core's rows: for each group its q heads, its k head, its v head; a cut may go through a head."""
    kinds = list(_heads(entry, shape))
    begin, end = _span(shape.kv_heads * sum(rows for _, _, rows in kinds), parts, part)
    at = 0
    for group in range(shape.kv_heads):
        for tensor, first, rows in kinds:
            low, high = max(begin, at), min(end, at + rows)
            source = first + group * rows - at
            yield _Rows(tensor, source + low, source + high, low - begin)
            at += rows


def _engine_rows(entry: Entry, shape: Architecture, tp: int, rank: int, shapes: Shapes) -> tuple[str, list[_Rows], int]:
    """vLLM's parameter, its rows, and the element where they begin."""
    name, first = entry.hf[0], shapes[entry.hf[0]]
    layer, _, kind = name.rpartition(".")
    module = layer.rpartition(".")[0]
    experts = f"{module.rpartition('.')[0]}.routed_experts"
    if ".linear_attn." in name:
        return _engine_net(name, shape, first, tp, rank)
    if entry.stacked:
        parameter = f"{layer}.routed_experts.{ENGINE_STACKED[kind]}"
        return parameter, list(_engine_stacked(name, kind, shape, first, tp=tp, rank=rank)), 0
    if entry.layout == "qkv":
        return f"{module}.qkv_proj.{kind}", list(_engine_heads(entry, shape, tp, rank)), 0
    if entry.layout == "gated":
        ffn = first[0] // (3 - len(entry.hf))
        begin, end = _span(ffn, tp, rank)
        halves = enumerate(_halves(entry, ffn))
        rows = [_Rows(tensor, at + begin, at + end, half * (end - begin)) for half, (tensor, at) in halves]
        if entry.expert is None:
            return f"{module}.gate_up_proj.weight", rows, 0
        base = entry.expert * 2 * (end - begin) * first[1]
        return f"{experts}.w13_weight", rows, base
    if entry.dim == 1:
        left, right = _span(first[1], tp, rank)
        rows = [_Rows(name, 0, first[0], 0, left, right)]
        if entry.expert is None:
            return name, rows, 0
        return f"{experts}.w2_weight", rows, entry.expert * first[0] * (right - left)
    if entry.dim is None:
        return name, [_Rows(name, 0, first[0], 0)], 0
    padded = PADDED_TO if len(first) > 1 else tp
    begin, end = _span(-(-first[0] // padded) * padded, tp, rank)
    return name, [_Rows(name, begin, min(end, first[0]), 0)], 0


def _engine_stacked(
    name: str, kind: str, shape: Architecture, first: tuple[int, ...], *, tp: int, rank: int
) -> Iterator[_Rows]:
    """Rows of all experts, which the engine transposes; its first rank alone adds the bias of their outputs."""
    if kind.startswith("gate_up"):
        yield _Rows(name, 0, first[0], 0, *_span(first[1], tp, rank))
    elif kind == "down_proj":
        each = first[0] // shape.experts
        begin, end = _span(each, tp, rank)
        for expert in range(shape.experts):
            yield _Rows(name, expert * each + begin, expert * each + end, expert * (end - begin))
    elif not rank:
        yield _Rows(name, 0, first[0], 0)


def _engine_net(
    name: str, shape: Architecture, first: tuple[int, ...], tp: int, rank: int
) -> tuple[str, list[_Rows], int]:
    """A part of a gated delta net: queries, keys, values and gates are one parameter, and each of them is cut."""
    net = shape.delta_net
    assert net is not None
    prefix, _, own = name.partition("linear_attn.")
    kind = own.partition(".")[0]
    if kind == "norm":
        return name, [_Rows(name, 0, first[0], 0)], 0
    if kind == "out_proj":
        return name, [_Rows(name, 0, first[0], 0, *_span(first[1], tp, rank))], 0
    to = {"in_proj_z": net.channels // tp, "in_proj_a": net.value_heads // tp}.get(kind, 0)
    rows = list(_each_cut(name, net.sections(own) or (first[0],), tp, rank, to))
    return f"{prefix}linear_attn.{ENGINE_NETS.get(kind, kind)}{own.removeprefix(kind)}", rows, 0


def _engine_heads(entry: Entry, shape: Architecture, tp: int, rank: int) -> Iterator[_Rows]:
    """Rows of ``qkv_proj``: the rank's q heads, its k heads, its v heads."""
    to = 0
    for i, (tensor, at, rows) in enumerate(_heads(entry, shape)):
        if i == 0 or shape.kv_heads >= tp:
            begin, end = _span(shape.kv_heads * rows, tp, rank)
        else:
            begin, end = _span(shape.kv_heads * rows, shape.kv_heads, rank * shape.kv_heads // tp)
        yield _Rows(tensor, at + begin, at + end, to)
        to += end - begin
