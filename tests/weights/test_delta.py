"""Sparse pieces: every density and encoding comes back, and its bytes are what the choice was made for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from libra_hpc.weights.delta import bits_of, dense, encoding_for, marked, piece_values, sparse
from libra_hpc.weights.pieces import (
    GAPS,
    Encoded,
    Encoding,
    TensorBlock,
    elements,
    offer_path,
    payload_path,
    write_offer,
)

from .test_pieces import gaps

BLOCK = TensorBlock("a", 64, 400, 150, 170)
COUNT = elements(BLOCK)


def encoded(share: float) -> tuple[np.ndarray, np.ndarray, Encoded]:
    """Positions, their values, and the piece."""
    drawn = np.random.default_rng(1)
    index = np.sort(drawn.choice(COUNT, max(1, round(share * COUNT)), replace=False)).astype(np.int32)
    values = drawn.integers(-(2**15), 2**15, COUNT).astype(np.int16)
    encoding = encoding_for(len(index), COUNT)
    if encoding == "dense":
        return np.arange(COUNT), values, dense(BLOCK, "BF16", values)
    return index, values[index], sparse(BLOCK, "BF16", encoding, index, values[index])


@pytest.mark.parametrize(
    ("share", "encoding", "relative"),
    [
        (0.0, "gap16", 0.001),
        (0.0025, "gap16", 0.006),
        (0.003, "gap8", 0.006),
        (0.022, "gap8", 0.034),
        (0.03, "gap8", 0.046),
        (0.12, "gap8", 0.181),
        (0.29, "bitmap", 0.36),
        (0.79, "bitmap", 0.86),
        (0.81, "dense", 1.0),
        (1.0, "dense", 1.0),
    ],
)
def test_a_piece_has_the_smallest_encoding(share: float, encoding: str, relative: float, tmp_path: Path) -> None:
    index, values, piece = encoded(share)
    assert piece.encoding == encoding
    offer = write_offer(tmp_path, 2, 1, "t0", [piece])
    assert offer.size <= relative * COUNT * 2
    found, bits = piece_values(offer.pieces[0], payload_path(offer_path(tmp_path, 2, "t0")).read_bytes())
    assert (bits == values).all()
    assert (index == (np.arange(COUNT) if found is None else found)).all()


@pytest.mark.parametrize("encoding", ["gap8", "gap16", "bitmap"])
def test_marked_elements_of_any_part_are_those_at_their_positions(encoding: Encoding) -> None:
    drawn = np.random.default_rng(2)
    values = drawn.integers(-(2**15), 2**15, 300_000).astype(np.int16)
    for count, begin, share in ((1, 3, 1.0), (7, 0, 0.5), (1000, 5, 0.03), (8192, 16, 0.3), (290_000, 9, 0.00001)):
        mask = drawn.random(len(values)) < share
        mask[begin] = True
        bits = bits_of(np.packbits(mask, bitorder="little"), begin, count)
        block, own = TensorBlock("a", begin, 1, count, count), values[begin : begin + count]
        index = np.flatnonzero(mask[begin : begin + count])
        bitmap = np.packbits(mask[begin : begin + count], bitorder="little")
        where = gaps(index, GAPS[encoding]) if encoding in GAPS else bitmap
        for given in (own, own[index]):
            found = marked(block, "BF16", encoding, bits, given)
            assert found.changed == len(index)
            for part, expected in zip(found.data, (own[index], where), strict=True):
                np.testing.assert_array_equal(part, expected)
