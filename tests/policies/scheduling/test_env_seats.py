"""Seats of environment nodes: where a trajectory goes, and why it waits."""

from __future__ import annotations

import pytest

from libra_hpc.policies.scheduling.env_seats import HostSeats, seat

HERE = HostSeats(0, 0, 3, ready=True)
"""A host on the rollout leader's node."""
BESIDE = "trajectories on the rollout leader's node, and no environment node"
TAKEN = "seats of environment nodes are taken"


def apart(host: int, seats: int, taken: int, ready: bool = True) -> HostSeats:
    """A host of an environment node."""
    return HostSeats(host, seats, taken, ready)


@pytest.mark.parametrize(
    ("hosts", "host", "reason"),
    [
        ([HERE, HostSeats(1, 0, 2, ready=True)], 1, f"2 {BESIDE}"),
        ([HERE, HostSeats(1, 0, 2, ready=False)], 0, f"3 {BESIDE}"),
        ([HERE._replace(ready=False)], 0, f"3 {BESIDE}"),
        ([HERE, apart(5, 4, 3), apart(6, 4, 1)], 6, "3 of 4 seats are free"),
        ([HERE, apart(5, 4, 4), apart(6, 2, 2)], None, f"all 6 {TAKEN}"),
        ([HERE, apart(5, 4, 4), apart(6, 4, 0, ready=False)], None, f"all 4 {TAKEN}"),
        ([HERE, apart(5, 4, 0, ready=False)], None, "none of the 1 hosts of environment nodes is ready"),
    ],
)
def test_a_trajectory_goes_to_the_most_free_seats(hosts: list[HostSeats], host: int | None, reason: str) -> None:
    assert seat(hosts) == (host, reason)
