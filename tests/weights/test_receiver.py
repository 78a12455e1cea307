"""The sum of a piece whose parts come in several streams at once."""

from __future__ import annotations

import threading
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


class Guarded(dict[int, tuple[int, int]]):
    """Parts that streams change one at a time: another stream may be looking through them."""

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock

    def pop(self, *arguments: Any) -> Any:
        assert self._lock.locked()
        return super().pop(*arguments)

    def __setitem__(self, *arguments: Any) -> None:
        assert self._lock.locked()
        super().__setitem__(*arguments)


def test_parts_of_a_piece_are_joined_in_any_order_by_one_stream_at_a_time() -> None:
    offer: Any = Arriving()
    receiver = OfferReceiver(None, offer, None, None)  # type: ignore[arg-type]
    receiver._parts[0] = Guarded(receiver._summing)
    begins = range(0, offer.offer.size, PART)
    # Two streams, from the middle and from the begin.
    order = [*begins[len(begins) // 2 :], *begins[: len(begins) // 2]]
    *before, whole = [receiver._joined(0, begin, begin + PART) for begin in order]
    assert set(before) == {None}
    assert whole == offer.offer.pieces[0].crc32
