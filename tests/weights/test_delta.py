"""Sparse pieces: every density comes back, and its bytes are what gaps were chosen for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from libra_hpc.weights.delta import DENSE, bits_of, marked, piece_values
from libra_hpc.weights.pieces import TensorBlock, elements, offer_path, payload_path, write_offer

from .test_pieces import gaps

BLOCK = TensorBlock("a", 64, 400, 150, 170)
COUNT = elements(BLOCK)


@pytest.mark.parametrize(
    ("share", "relative"), [(0.0, 0.005), (0.003, 0.006), (0.022, 0.034), (0.12, 0.181), (0.29, 0.436), (DENSE, 1.0)]
)
def test_a_piece_is_small_and_comes_back(share: float, relative: float, tmp_path: Path) -> None:
    drawn = np.random.default_rng(1)
    index = np.sort(drawn.choice(COUNT, max(1, round(share * COUNT)), replace=False))
    values = drawn.integers(-(2**15), 2**15, len(index)).astype(np.int16)
    bits = np.packbits(np.isin(np.arange(COUNT), index), bitorder="little")
    offer = write_offer(tmp_path, 2, 1, "t0", [marked(BLOCK, "BF16", bits, values)])
    assert offer.size <= relative * COUNT * 2
    found, same = piece_values(offer.pieces[0], payload_path(offer_path(tmp_path, 2, "t0")).read_bytes())
    np.testing.assert_array_equal(same, values)
    np.testing.assert_array_equal(found, index)


def test_marked_elements_of_any_part_are_those_at_their_positions() -> None:
    drawn = np.random.default_rng(2)
    values = drawn.integers(-(2**15), 2**15, 300_000).astype(np.int16)
    for count, begin, share in ((1, 3, 1.0), (7, 0, 0.5), (1000, 5, 0.03), (8192, 16, 0.3), (290_000, 9, 0.00001)):
        mask = drawn.random(len(values)) < share
        mask[begin] = True
        bits = bits_of(np.packbits(mask, bitorder="little"), begin, count)
        block, own = TensorBlock("a", begin, 1, count, count), values[begin : begin + count]
        index = np.flatnonzero(mask[begin : begin + count])
        for given in (own, own[index]):
            found = marked(block, "BF16", bits, given)
            assert found.changed == len(index)
            for part, expected in zip(found.data, (own[index], gaps(index)), strict=True):
                np.testing.assert_array_equal(part, expected)
