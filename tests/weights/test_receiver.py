"""The sum of a piece whose parts come in several streams at once."""

from __future__ import annotations

import zlib
from typing import Any

from libra_hpc.weights.pieces import WHOLE, Offer, TensorBlock, WeightPiece
from libra_hpc.weights.receiver import OfferReceiver
from tests.weights.nodes import bits

COUNT, PART = 4096, 1024


class Arriving:
    """What `OfferReceiver` needs of an offer."""

    def __init__(self) -> None:
        values = bits(1, COUNT)
        self.view = values.data.cast("B")
        block = TensorBlock("a", 0, 1, COUNT, COUNT)
        piece = WeightPiece(block, "BF16", "dense", COUNT, 0, values.nbytes, zlib.crc32(values.data))
        self.offer = Offer(1, WHOLE, "t0.0", (piece,), values.nbytes)


def test_parts_of_a_piece_are_joined_in_any_order() -> None:
    offer: Any = Arriving()
    receiver = OfferReceiver(None, offer, None, None)  # type: ignore[arg-type]
    begins = range(0, offer.offer.size, PART)
    # Two streams, from the middle and from the begin.
    order = [*begins[len(begins) // 2 :], *begins[: len(begins) // 2]]
    *before, whole = [receiver._joined(0, begin, begin + PART) for begin in order]
    assert set(before) == {None}
    assert whole == offer.offer.pieces[0].crc32
