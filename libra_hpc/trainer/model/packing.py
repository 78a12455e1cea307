"""Samples to packed micro-batches: sequences of many lengths in one row, without padding between them.

Samples are sorted by length and packed greedily up to ``micro_tokens``. Attention alone needs the lengths, in one of
two forms (`trainer.model.attention`): `Block` s, runs of similar length, each padded by itself, or `Piece` s, where
each sequence begins and ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from libra_hpc.protocol.trainer import Sample
from libra_hpc.weights.names import ReplicaPlace

from .context import Tail, pieces
from .mcore import PackedSeqParams
from .rotary import RotaryTable

PADDED_COST = 1.5
"""Most padded attention cost of a block, relative to what its sequences need (quadratic in length).

At 1.0 (no padding) each length is one kernel per layer. At 1.5 a heavy-tailed batch of 64 has 4-6 blocks. Without a
bound, one 4k sequence among 200-token ones dominates the step.
"""
ALONE = ReplicaPlace(tp=1, tp_rank=0, pp=1, pp_rank=0)


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
    trajectory_tokens: int = 0
    """See `Sample.trajectory_tokens`."""


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
    columns: range
    """Range of the whole pack."""
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
    tails: tuple[Tail, ...] | None = None
    """None: no context parallelism."""
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
    sequences: torch.Tensor
    """int64[m], place of a loss token's sequence in the pack"""
    lengths: torch.Tensor
    """float32[s], loss tokens of each sequence on all context ranks"""
    trajectories: torch.Tensor
    """float32[s], loss tokens of each sequence's trajectory, in all its samples"""
    filled: int
    """Tokens without padding, which fills a pack up to equal shares of the ranks."""


def decode(sample: Sample) -> Example:
    """Turn a wire sample into tensors.

    Raises `ValueError` when its arrays differ in length or its first token is marked for loss.
    """
    tokens = torch.frombuffer(bytearray(sample.tokens), dtype=torch.int32).long()
    mask = torch.frombuffer(bytearray(sample.loss_mask), dtype=torch.uint8).bool()
    logprobs = torch.frombuffer(bytearray(sample.logprobs), dtype=torch.float32)
    one = example(sample.uid, tokens=tokens, mask=mask, logprobs=logprobs, advantage=sample.advantage)
    if sample.advantages:
        one = one._replace(advantages=torch.frombuffer(bytearray(sample.advantages), dtype=torch.float32))
    return one._replace(trajectory_tokens=sample.trajectory_tokens)


def example(uid: str, tokens: torch.Tensor, mask: torch.Tensor, logprobs: torch.Tensor, advantage: float) -> Example:
    """Build a checked example; raises `ValueError` as `decode` does."""
    if not len(tokens) == len(mask) == len(logprobs):
        raise ValueError(
            f"sample {uid}: {len(tokens)} tokens, {len(mask)} mask entries, {len(logprobs)} log-probabilities"
        )
    if len(mask) and bool(mask[0]):
        raise ValueError(f"sample {uid}: the first token is marked for loss, but nothing predicts it")
    return Example(tokens, mask, logprobs, torch.full_like(logprobs, advantage))


def pack(
    examples: Sequence[Example], micro_tokens: int, device: torch.device, place: ReplicaPlace = ALONE
) -> list[Pack]:
    """Pack ``examples`` into micro-batches of at most ``micro_tokens`` tokens; a longer one is alone in its own.

    Examples without loss tokens are left out. Context ranks share a micro-batch: each loss token is in one of their
    packs.
    """
    useful = sorted((s for s in examples if bool(s.mask.any())), key=lambda s: -len(s.tokens))
    groups: list[list[Example]] = []
    room = 0
    for item in useful:
        if not groups or len(item.tokens) > room:
            groups.append([])
            room = micro_tokens
        groups[-1].append(item)
        room -= len(item.tokens)
    return [_assemble(group, device, place) for group in groups]


def padding(device: torch.device, place: ReplicaPlace) -> Pack:
    """A pack without samples, for a rank that has none when others have."""
    return _assemble([], device, place)


def _assemble(group: list[Example], device: torch.device, place: ReplicaPlace) -> Pack:
    lengths = [len(s.tokens) for s in group]
    count = sum(lengths)
    own = pieces(max(count, 1), place)
    rows = torch.cat([torch.arange(piece.start, piece.stop) for piece in own])
    rest = len(rows) * place.cp - count
    if rest:
        # A sequence of its own, without loss.
        lengths.append(rest)
    tokens = torch.cat([*(s.tokens for s in group), torch.zeros(rest, dtype=torch.int64)])
    mask = torch.cat([*(s.mask for s in group), torch.zeros(rest, dtype=torch.bool)])
    targets_at = mask.nonzero().squeeze(1)
    row_of = torch.full_like(tokens, -1)
    row_of[rows] = torch.arange(len(rows))
    where = row_of[targets_at - 1]
    mine = where >= 0
    behaviour = torch.cat([torch.empty(0), *(s.logprobs[s.mask] for s in group)])
    counts = torch.tensor([int(s.mask.sum()) for s in group], dtype=torch.int64)
    sequences = torch.arange(len(group)).repeat_interleave(counts)
    advantages = torch.cat([torch.empty(0), *(s.advantages[s.mask] for s in group)])
    bounds = _bounds(lengths, device)
    blocks, tails = _attention(lengths, own, device)
    longest = max(lengths)
    layout = PackedLayout(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        pieces=_pieces(lengths, own, device),
        blocks=blocks,
        tails=None if place.cp == 1 else tails,
    )
    return Pack(
        tokens=tokens[rows][None].to(device),
        positions=torch.cat([torch.arange(n) for n in lengths])[rows][None].to(device),
        layout=layout,
        where=where[mine].to(device),
        targets=tokens[targets_at[mine]].to(device),
        behaviour=behaviour[mine].to(device),
        advantages=advantages[mine].to(device),
        sequences=sequences[mine].to(device),
        lengths=counts.float().to(device),
        trajectories=torch.tensor([float(s.trajectory_tokens or s.mask.sum()) for s in group]).to(device),
        filled=int((rows < count).sum()),
    )


def _pieces(lengths: list[int], own: tuple[range, ...], device: torch.device) -> tuple[Piece, ...]:
    """The own pieces of a pack of sequences."""
    found: list[Piece] = []
    before = 0
    for piece in own:
        rows: list[int] = []
        columns: list[int] = []
        first = 0
        for length in lengths:
            begin, end = max(first, piece.start), min(first + length, piece.stop)
            if begin < end:
                rows.append(end - begin)
                columns.append(end - first)
            first += length
        row_bounds = _bounds(rows, device)
        found.append(
            Piece(
                rows=range(before, before + len(piece)),
                columns=range(piece.stop - sum(columns), piece.stop),
                row_bounds=row_bounds,
                column_bounds=row_bounds if rows == columns else _bounds(columns, device),
                most_rows=max(rows),
                most_columns=max(columns),
            )
        )
        before += len(piece)
    return tuple(found)


def _bounds(lengths: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(device=device, dtype=torch.int32)


def _attention(
    lengths: list[int], own: tuple[range, ...], device: torch.device
) -> tuple[tuple[Block, ...], tuple[Tail, ...]]:
    """Blocks and tails of the own pieces of a pack of sequences; together they have every own row."""
    blocks: list[Block] = []
    tails: list[Tail] = []
    before = 0
    for piece in own:
        begun: list[int] = []
        first = 0
        for length in lengths:
            begin, end = max(first, piece.start), min(first + length, piece.stop)
            if first < begin < end:
                tails.append(Tail(before + begin - piece.start, before + end - piece.start, first, end))
            elif begin < end:
                begun.append(end - begin)
            first += length
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
