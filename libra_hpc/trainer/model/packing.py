"""Samples to packed micro-batches: sequences of many lengths in one row, without padding between them.

Samples are sorted by length and packed greedily up to ``micro_tokens``. Attention alone needs the lengths, in one of
two forms (`trainer.model.attention`): `Block` s, runs of similar length, each padded by itself, or `Piece` s, where
each sequence begins and ends. Sequences with a common beginning share its rows: later ones attend to them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import NamedTuple

import torch

from libra_hpc.models.shapes import ModelShape
from libra_hpc.protocol.trainer import Sample
from libra_hpc.weights.names import ReplicaPlace

from .context import Tail, pieces
from .mcore import PackedSeqParams
from .prefixes import families
from .rotary import RotaryTable

PADDED_COST = 1.5
"""Most padded attention cost of a block, relative to what its sequences need (quadratic in length).

At 1.0 (no padding) each length is one kernel per layer. At 1.5 a heavy-tailed batch of 64 has 4-6 blocks. Without a
bound, one 4k sequence among 200-token ones dominates the step.
"""
COLUMNS = 4
"""Most tokens of a pack's sequences, in micro-batches. Those that they share are computed once, but each sequence
copies their keys and values. Half: a system prompt of eight siblings is computed twice. Double: these copies are a
quarter of a layer's memory."""
ALONE = ReplicaPlace(tp=1, tp_rank=0, pp=1, pp_rank=0)


class Choices(NamedTuple):
    """Experts that the rollout engine chose for ``t`` tokens."""

    known: torch.Tensor
    """bool[t]"""
    experts: torch.Tensor
    """uint8 or int16 [t, layers, k]; any where they are not known"""


class Example(NamedTuple):
    """One training sequence of ``n`` tokens, on the host."""

    tokens: torch.Tensor
    """int64[n]"""
    mask: torch.Tensor
    """bool[n], tokens that carry loss; never the first."""
    logprobs: torch.Tensor
    """float32[n], behaviour log-probabilities, 0 outside the mask."""
    advantages: torch.Tensor
    """float32[n]"""
    engines: torch.Tensor
    """int64[n], numbers as in `Sample.loss_mask`."""
    trajectory_tokens: int = 0
    """See `Sample.trajectory_tokens`."""
    choices: Choices | None = None
    """None: every token routes by itself."""


class Block(NamedTuple):
    """Tokens ``begin:end`` of a pack: ``rows`` sequences of at most ``width`` tokens.

    Token ``i`` goes to cell ``place[i]`` of the rectangle.
    """

    begin: int
    end: int
    rows: int
    width: int
    place: torch.Tensor | None
    """int64[end - begin]; None when all sequences have ``width`` tokens."""


class Piece(NamedTuple):
    """Consecutive own rows of a pack, segment by segment: the rows of one sequence, and the columns up to the last."""

    rows: range
    """Range of the own rows; pieces follow each other."""
    begin: int
    """The first own row, in the whole pack."""
    columns: range | torch.Tensor
    """Rows of the whole pack, segment by segment; int64, where sequences share a beginning."""
    row_bounds: torch.Tensor
    """int32[segments + 1], from 0"""
    column_bounds: torch.Tensor
    """int32[segments + 1], from 0; the same tensor where each segment begins its sequence"""
    most_rows: int
    """Rows of the longest segment."""
    most_columns: int


@dataclass
class PackedLayout(PackedSeqParams):
    """Megatron-Core's description of a pack, plus the fields of `PackedAttention`."""

    pieces: tuple[Piece, ...] = ()
    blocks: tuple[Block, ...] = ()
    tails: tuple[Tail, ...] = ()
    gathered: bool = False
    """Whether context ranks have other tokens of the pack."""
    choices: Choices | None = None
    """None: every token routes by itself."""
    rotary: list[RotaryTable] | None = None
    """`trainer.model.rotary.Rotary.tables`, set by the engine for one pass."""


class Pack(NamedTuple):
    """One packed micro-batch, on the training device: this context rank's ``t`` tokens, ``m`` with loss."""

    tokens: torch.Tensor
    """int64[1, t]"""
    positions: torch.Tensor
    """int64[1, t], each sequence from 0"""
    layout: PackedLayout
    where: torch.Tensor
    """int64[m], position whose logits predict the loss token"""
    targets: torch.Tensor
    """int64[m], the loss tokens"""
    behaviour: torch.Tensor
    """float32[m]"""
    advantages: torch.Tensor
    """float32[m]"""
    engines: torch.Tensor
    """int64[m], number of the engine of a loss token"""
    sequences: torch.Tensor
    """int64[m], place of a loss token's sequence in the pack"""
    lengths: torch.Tensor
    """float32[s], loss tokens of each sequence on all context ranks"""
    trajectories: torch.Tensor
    """float32[s], loss tokens of each sequence's trajectory, in all its samples"""
    filled: int
    """Tokens without padding, which fills a pack up to equal shares of the ranks."""
    shared: int
    """Tokens of beginnings that other sequences of the pack have; the first context rank counts them."""
    unrouted: int
    """Tokens before others whose experts should be known and are not; counted as ``shared``."""


def decode(sample: Sample, routed: ModelShape | None = None) -> Example:
    """Turn a wire sample into tensors, with the experts of a mixture that is ``routed`` as in the rollout.

    Raises `ValueError` when its arrays differ in length, its first token is marked for loss, or an expert is unknown.
    """
    tokens = torch.frombuffer(bytearray(sample.tokens), dtype=torch.int32).long()
    mask = torch.frombuffer(bytearray(sample.loss_mask), dtype=torch.uint8)
    logprobs = torch.frombuffer(bytearray(sample.logprobs), dtype=torch.float32)
    one = example(sample.uid, tokens=tokens, mask=mask, logprobs=logprobs, advantage=sample.advantage)
    if sample.advantages:
        one = one._replace(advantages=torch.frombuffer(bytearray(sample.advantages), dtype=torch.float32))
    choices = _choices(sample, len(tokens), routed) if routed and routed.experts else None
    return one._replace(trajectory_tokens=sample.trajectory_tokens, choices=choices)


def _choices(sample: Sample, count: int, shape: ModelShape) -> Choices:
    size = count, shape.layers, shape.experts_per_token
    choice = torch.uint8 if shape.experts <= 256 else torch.int16
    if not sample.experts:
        return Choices(torch.zeros(count, dtype=torch.bool), torch.zeros(size, dtype=choice))
    flat = torch.frombuffer(bytearray(sample.experts), dtype=choice)
    if (flat.numel(), len(sample.routed)) != (math.prod(size), count):
        raise ValueError(f"sample {sample.uid}: {flat.numel()} chosen experts, {math.prod(size)} are needed")
    if not 0 <= int(flat.min()) <= int(flat.max()) < shape.experts:
        raise ValueError(f"sample {sample.uid}: an expert beyond the model's {shape.experts}")
    return Choices(torch.frombuffer(bytearray(sample.routed), dtype=torch.bool), flat.view(size))


def example(uid: str, tokens: torch.Tensor, mask: torch.Tensor, logprobs: torch.Tensor, advantage: float) -> Example:
    """Build a checked example; raises `ValueError` as `decode` does."""
    if not len(tokens) == len(mask) == len(logprobs):
        raise ValueError(
            f"sample {uid}: {len(tokens)} tokens, {len(mask)} mask entries, {len(logprobs)} log-probabilities"
        )
    if len(mask) and bool(mask[0]):
        raise ValueError(f"sample {uid}: the first token is marked for loss, but nothing predicts it")
    return Example(tokens, mask.bool(), logprobs, torch.full_like(logprobs, advantage), mask.long())


def pack(
    examples: Sequence[Example],
    micro_tokens: int,
    device: torch.device,
    place: ReplicaPlace = ALONE,
    *,
    shares: bool = False,
) -> list[Pack]:
    """Pack ``examples`` into micro-batches of at most ``micro_tokens`` tokens; a longer one is alone in its own.

    Examples without loss tokens are left out. Context ranks share a micro-batch: each loss token is in one of their
    packs. ``shares``: common beginnings of a pack are computed once (`libra_hpc.trainer.model.prefixes`).
    """
    units = _units([one for one in examples if bool(one.mask.any())], micro_tokens, shares)
    groups: list[list[_Part]] = []
    rows = columns = 0
    for unit in sorted(units, key=lambda unit: -sum(part.rows for part in unit)):
        own, whole = sum(part.rows for part in unit), sum(len(part.example.tokens) for part in unit)
        if not groups or own > rows or whole > columns:
            groups.append([])
            rows, columns = micro_tokens, COLUMNS * micro_tokens
        groups[-1] += unit
        rows, columns = rows - own, columns - whole
    return [_assemble(group, device, place) for group in groups]


def padding(device: torch.device, place: ReplicaPlace) -> Pack:
    """A pack without samples, for a rank that has none when others have."""
    return _assemble([], device, place)


class _Part(NamedTuple):
    example: Example
    shared: int
    """Tokens at its beginning that the part before it has."""

    @property
    def rows(self) -> int:
        return len(self.example.tokens) - self.shared


def _units(examples: Sequence[Example], micro_tokens: int, shares: bool) -> list[list[_Part]]:
    """The examples in lists that stay together in a pack."""
    if not shares:
        return [[_Part(one, 0)] for one in examples]
    units: list[list[_Part]] = []
    rows = columns = 0
    for index, shared in chain.from_iterable(families([one.tokens.int().numpy() for one in examples])):
        count = len(examples[index].tokens)
        if not shared or rows + count - shared > micro_tokens or columns + count > COLUMNS * micro_tokens:
            units.append([])
            rows = columns = shared = 0
        units[-1].append(_Part(examples[index], shared))
        rows, columns = rows + count - shared, columns + count
    return units


class _Span(NamedTuple):
    """A sequence in a pack."""

    rows: range
    """Own rows in the whole pack."""
    places: torch.Tensor | None = None
    """int64[n], rows of all its tokens; None: it shares none."""

    def columns(self, end: int) -> range | torch.Tensor:
        """Rows of its tokens before own row ``end``."""
        if self.places is None:
            return range(self.rows.start, end)
        return self.places[: len(self.places) - (self.rows.stop - end)]


def _spans(parts: Sequence[_Part], device: torch.device) -> tuple[list[_Part], list[torch.Tensor], list[_Span]]:
    """The parts in their order in the pack, rows of their tokens, and their spans.

    Those that share are the first, because the others must be one run (`_blocks`).
    """
    order = sorted(range(len(parts)), key=lambda i: (not parts[i].shared, -len(parts[i].example.tokens)))
    ends = list(accumulate((parts[i].rows for i in order), initial=0))
    rows = {i: range(begin, end) for i, begin, end in zip(order, ends, ends[1:], strict=False)}
    places: list[torch.Tensor] = []
    for i, part in enumerate(parts):
        own = torch.arange(rows[i].start, rows[i].stop)
        places.append(torch.cat((places[-1][: part.shared], own)) if part.shared else own)
    spans = [_Span(rows[i], places[i].to(device) if parts[i].shared else None) for i in order]
    return [parts[i] for i in order], [places[i] for i in order], spans


def _assemble(parts: Sequence[_Part], device: torch.device, place: ReplicaPlace) -> Pack:
    parts, places, spans = _spans(parts, device)
    group = [part.example for part in parts]
    count = sum(part.rows for part in parts)
    own = pieces(max(count, 1), place)
    rows = torch.cat([torch.arange(piece.start, piece.stop) for piece in own])
    rest = len(rows) * place.cp - count
    if rest:
        # A sequence of its own, without loss.
        spans.append(_Span(range(count, count + rest)))
    tokens = torch.cat([*(one.tokens[shared:] for one, shared in parts), torch.zeros(rest, dtype=torch.int64)])
    positions = torch.cat([*(torch.arange(shared, len(one.tokens)) for one, shared in parts), torch.arange(rest)])
    row_of = torch.full_like(tokens, -1)
    row_of[rows] = torch.arange(len(rows))
    before, targets, engines = _loss_tokens(group, places)
    where = row_of[before]
    mine = where >= 0
    behaviour = torch.cat([torch.empty(0), *(s.logprobs[s.mask] for s in group)])
    counts = torch.tensor([int(s.mask.sum()) for s in group], dtype=torch.int64)
    sequences = torch.arange(len(group)).repeat_interleave(counts)
    advantages = torch.cat([torch.empty(0), *(s.advantages[s.mask] for s in group)])
    bounds = _bounds([len(span.rows) for span in spans], device)
    blocks, tails = _attention(spans, own, device)
    longest = int(positions.max()) + 1
    layout = PackedLayout(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        pieces=_pieces(spans, own, device),
        blocks=blocks,
        tails=tails,
        gathered=place.cp > 1,
        choices=_of_rows(parts, rest, rows, device),
    )
    return Pack(
        tokens=tokens[rows][None].to(device),
        positions=positions[rows][None].to(device),
        layout=layout,
        where=where[mine].to(device),
        targets=targets[mine].to(device),
        behaviour=behaviour[mine].to(device),
        advantages=advantages[mine].to(device),
        engines=engines[mine].to(device),
        sequences=sequences[mine].to(device),
        lengths=counts.float().to(device),
        trajectories=torch.tensor([float(s.trajectory_tokens or s.mask.sum()) for s in group]).to(device),
        filled=int((rows < count).sum()),
        shared=sum(part.shared for part in parts) if place.cp_rank == 0 else 0,
        unrouted=_unrouted(group) * (place.cp_rank == 0),
    )


def _unrouted(group: Sequence[Example]) -> int:
    return sum(int((~one.choices.known[:-1]).sum()) for one in group if one.choices)


def _of_rows(parts: Sequence[_Part], rest: int, rows: torch.Tensor, device: torch.device) -> Choices | None:
    """Choices of ``rows`` of the whole pack; a beginning has those of the first sequence that has it."""
    found = [tuple(x[one.shared :] for x in one.example.choices) for one in parts if one.example.choices]
    if not found:
        return None
    padding = (found[0][0].new_zeros(rest), found[0][1].new_zeros(rest, *found[0][1].shape[1:]))
    return Choices(*(torch.cat(x)[rows].to(device) for x in zip(*found, padding, strict=True)))


def _loss_tokens(group: Sequence[Example], places: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Rows of the tokens before those with loss, these, and their engines, int64[m]; ``places``: rows of each example's
    tokens."""
    before = [at[one.mask.nonzero()[:, 0] - 1] for one, at in zip(group, places, strict=True)]
    nothing = torch.empty(0, dtype=torch.int64)
    found = (before, [one.tokens[one.mask] for one in group], [one.engines[one.mask] for one in group])
    return (torch.cat([nothing, *parts]) for parts in found)


def _cut(spans: Sequence[_Span], piece: range) -> Iterator[tuple[_Span, int, int]]:
    """The spans of a piece, with the first row in it and the one after the last."""
    for span in spans:
        begin, end = max(span.rows.start, piece.start), min(span.rows.stop, piece.stop)
        if begin < end:
            yield span, begin, end


def _pieces(spans: Sequence[_Span], own: tuple[range, ...], device: torch.device) -> tuple[Piece, ...]:
    """The own pieces of a pack of sequences."""
    found: list[Piece] = []
    before = 0
    for piece in own:
        cut = list(_cut(spans, piece))
        rows = [end - begin for _, begin, end in cut]
        columns = [span.columns(end) for span, _, end in cut]
        widths = [len(one) for one in columns]
        row_bounds = _bounds(rows, device)
        found.append(
            Piece(
                rows=range(before, before + len(piece)),
                begin=piece.start,
                columns=_joined(columns, device),
                row_bounds=row_bounds,
                column_bounds=row_bounds if rows == widths else _bounds(widths, device),
                most_rows=max(rows),
                most_columns=max(widths),
            )
        )
        before += len(piece)
    return tuple(found)


def _bounds(lengths: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(device=device, dtype=torch.int32)


def _joined(columns: Sequence[range | torch.Tensor], device: torch.device) -> range | torch.Tensor:
    ranges = [one for one in columns if isinstance(one, range)]
    if len(ranges) == len(columns):
        return range(ranges[0].start, ranges[-1].stop)
    parts = [torch.arange(one.start, one.stop, device=device) if isinstance(one, range) else one for one in columns]
    return torch.cat(parts)


def _attention(
    spans: Sequence[_Span], own: tuple[range, ...], device: torch.device
) -> tuple[tuple[Block, ...], tuple[Tail, ...]]:
    """Blocks and tails of the own pieces of a pack of sequences; together they have every own row."""
    blocks: list[Block] = []
    tails: list[Tail] = []
    before = 0
    for piece in own:
        begun: list[int] = []
        for span, begin, end in _cut(spans, piece):
            if span.places is None and begin == span.rows.start:
                begun.append(end - begin)
            else:
                at = before - piece.start
                tails.append(Tail(at + begin, at + end, span.columns(end)))
        before += len(piece)
        blocks += _blocks(begun, before - sum(begun), device)
    return tuple(blocks), tuple(tails)


def _blocks(lengths: list[int], begin: int, device: torch.device) -> list[Block]:
    """Blocks of the sequences that fill the rows from ``begin`` on, longest first but for padding at the end."""
    blocks: list[Block] = []
    first = 0
    while first < len(lengths):
        width = lengths[first]
        last, need = first, 0
        while (
            last < len(lengths)
            and lengths[last] <= width
            and (last - first + 1) * width**2 <= PADDED_COST * (need + lengths[last] ** 2)
        ):
            need += lengths[last] ** 2
            last += 1
        run = lengths[first:last]
        end = begin + sum(run)
        index = None
        if run[-1] != width:
            index = torch.cat([torch.arange(row * width, row * width + n) for row, n in enumerate(run)]).to(device)
        blocks.append(Block(begin=begin, end=end, rows=len(run), width=width, place=index))
        begin, first = end, last
    return blocks
