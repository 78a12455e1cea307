"""Which prompts are trained, and that none is twice."""

from __future__ import annotations

import pytest

from libra_hpc.state.state_folders import DataOrder


def test_the_data_order_refuses_to_count_twice() -> None:
    order = DataOrder(4, (6,))
    order.trained([5])
    assert (order.low, order.extra) == (4, {5, 6})
    order.trained([4])
    assert (order.low, order.extra) == (7, set())
    order.trained([9])
    for trained in (5, 9):
        with pytest.raises(ValueError, match=f"prompt {trained} is"):
            order.trained([trained])
