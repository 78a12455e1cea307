"""Which environment host gets a trajectory: pure, from a snapshot of all hosts to a host and the reason.

- Hosts of environment nodes have seats, one for a trajectory -> that with the most free ones.
- None is free -> the trajectory waits for one.
- There is no environment node, or each is lost -> the host with the fewest trajectories on the rollout leader's node.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class HostSeats(NamedTuple):
    """One environment host."""

    host: int
    seats: int
    """0: it is on the rollout leader's node, and has any number."""
    taken: int
    ready: bool


class Seating(NamedTuple):
    host: int | None
    """None: wait."""
    reason: str


def seat(hosts: Sequence[HostSeats]) -> Seating:
    """The host of the next trajectory; ``hosts``: without those of lost nodes."""
    apart = [host for host in hosts if host.seats]
    if not apart:
        # Without a ready one it waits in the queue of a host that starts.
        best = min([host for host in hosts if host.ready] or hosts, key=lambda host: host.taken)
        return Seating(best.host, f"{best.taken} trajectories on the rollout leader's node, and no environment node")
    ready = [host for host in apart if host.ready]
    if not ready:
        return Seating(None, f"none of the {len(apart)} hosts of environment nodes is ready")
    best = max(ready, key=lambda host: host.seats - host.taken)
    if best.taken >= best.seats:
        return Seating(None, f"all {sum(host.seats for host in ready)} seats of environment nodes are taken")
    return Seating(best.host, f"{best.seats - best.taken} of {best.seats} seats are free")
