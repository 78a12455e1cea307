"""A node with a budget for weights takes no more of its link, and every version arrives."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from libra_hpc.protocol.carriers import ImageHere, PieceRefused, Stalled, VersionHere
from libra_hpc.weights.transport.token_bucket import BURST_S
from tests.weights.chain import SHAPES, Chain, here
from tests.weights.nodes import CarrierNode, node_folders


@pytest.mark.parametrize("bytes_per_s", [4e6, 32e6])
def test_a_pull_takes_at_least_the_time_of_its_budget(bytes_per_s: float) -> None:
    with node_folders() as folder, ExitStack() as stack:
        chain = Chain(stack, folder, 1)
        guest = CarrierNode(folder / "guest", 1, SHAPES, pull_bytes_per_s=bytes_per_s)
        stack.callback(guest.close)
        chain.nodes.append(guest)
        chain.write(0, -1)
        came = guest.wait(VersionHere, here(0))
        assert came.wire_s >= came.bytes / bytes_per_s - BURST_S
        guest.wait(ImageHere, here(0))
        assert chain.payload(0, 0) == chain.payload(1, 0)
        assert not guest.all(PieceRefused)
        assert not guest.all(Stalled)
