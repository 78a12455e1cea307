"""What rank 0 makes of the reports it gets."""

from __future__ import annotations

import pytest

from libra_hpc.pool.observations import Observations
from libra_hpc.protocol.mesh import RolloutReport


def report(busy_s: float, generated: int) -> RolloutReport:
    buckets = ((2, 4, 0, 0, 0.0), (4, 2, 0, 0, 0.0))
    return RolloutReport(0, 0, 0, 0, 0, 0, 0, 0.0, generated, 0, busy_s, 0.0, buckets, ())


def test_the_busy_share_is_that_of_all_engines_of_all_nodes() -> None:
    seen = Observations()
    seen.on_rollout(report(0.0, 0), (3, 4), 10.0)
    seen.on_rollout(report(4.8, 900), (3, 4), 12.0)
    (window,) = seen.windows
    assert (window.nodes, window.seconds, window.generated_tokens) == (2, 2.0, 900)
    assert window.busy == pytest.approx(4.8 / (2.0 * 6)), "six engines on two nodes"
