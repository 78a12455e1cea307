"""How the agents find each other: the owner of the run has numbered them, and carries their addresses.

MPI is in a process beside each agent (`libra_hpc.mesh.mpi_process`), because no MPI survives a dead member
(docs/network.md).  Messages go over sockets of our own (`libra_hpc.mesh.links`), Layouts by MPI.

- All ranks on one machine, and no guests wanted -> they listen on loopback.  Otherwise on `slurm.interface`, or on
  every interface.
- The owner has a secret for the run; who connects must prove that it has it.
- A rank that cannot reach rank 0 -> every rank raises the same sentence.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import psutil

from libra_hpc.process.addresses import listen, loopback, own_addresses
from libra_hpc.process.owner_link import NoWorld, OwnerLink
from libra_hpc.process.retry import Patience
from libra_hpc.protocol.joining import guest_secret

from .folder_meeting import FolderMeeting

REACH_S = 5.0
"""For one address of rank 0 to answer.

Half: a busy switch looks like a wrong address; double: several wrong ones use up `MEET_S`.
"""
REACH_AGAIN_S = 60.0
"""For any address of rank 0 to answer where the ranks have met before: a switch restarts in a minute.

Half: the ranks start more often meanwhile; double: longer than `MEET_S`.
"""


class Endpoint(msgspec.Struct, frozen=True):
    """Where a rank listens: addresses in order of trial, all with one port."""

    host: str
    addresses: tuple[str, ...]
    port: int
    parts: tuple[str, ...] = ()
    """Parts of snapshots on its node."""


class World(msgspec.Struct, frozen=True):
    """The ranks of one start, from the view of one of them."""

    rank: int
    endpoints: tuple[Endpoint, ...]
    secret: bytes
    listener: socket.socket
    """Bound and listening before any rank has its address."""
    guests: dict[int, Endpoint] = {}
    """Agents that joined later, by rank."""

    @property
    def size(self) -> int:
        return len(self.endpoints)

    def endpoint(self, rank: int) -> Endpoint | None:
        """None of a guest that was not announced yet."""
        return self.endpoints[rank] if rank < self.size else self.guests.get(rank)

    def secret_with(self, peer: int) -> bytes:
        """What a rank and a peer prove themselves with; a guest has no other secret than that of guests."""
        return guest_secret(self.secret) if self.rank < self.size <= peer else self.secret


class _Report(msgspec.Struct):
    """First and last round: why a rank cannot go on, if so, and its machine."""

    problem: str
    machine: str = ""


Meeting = OwnerLink | FolderMeeting
_DECODERS: dict[type, msgspec.msgpack.Decoder[Any]] = {
    kind: msgspec.msgpack.Decoder(kind) for kind in (_Report, Endpoint)
}
Record = TypeVar("Record", _Report, Endpoint)


def meet(
    meeting: Meeting,
    interface: str = "",
    problem: str = "",
    parts: Callable[[int], tuple[str, ...]] = lambda rank: (),
    *,
    guests: bool = False,
    again: bool = False,
) -> World:
    """Join the world; returns once every rank is there, can be found and reaches rank 0.

    ``problem``: why the caller cannot go on.  ``parts``: the parts of snapshots that a rank finds on its node.
    ``guests``: agents of other machines will join.  ``again``: the run's ranks have met before; rank 0 is waited for.
    Raises `NoWorld` on every rank alike, with the first problem of any.

    The same where the ranks have not come together in time: whoever started them may try again.
    """
    addresses = own_addresses(interface)
    if interface and not addresses:
        problem = (
            problem
            or f"slurm.interface = {interface!r}: {socket.gethostname()} has no such interface with an address; "
            f"it has {', '.join(sorted(psutil.net_if_addrs()))}"
        )
    reports = _agree(meeting, _Report(problem, _machine()))
    if interface:
        addresses = addresses[:1]
    elif len({report.machine for report in reports}) == 1 and not guests:
        addresses = [loopback()]
    listener = listen(addresses, 2 * len(reports))
    listener.setblocking(False)
    own = Endpoint(socket.gethostname(), tuple(addresses), listener.getsockname()[1], parts(meeting.rank))
    endpoints = _exchange(meeting, own)
    reached = _reach(endpoints[0], endpoints[meeting.rank], REACH_AGAIN_S if again else 0.0)
    _agree(meeting, _Report(reached))
    return World(meeting.rank, tuple(endpoints), meeting.secret, listener)


def _machine() -> str:
    """A name unlike that of any other machine or container with a network of its own."""
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.stat('/proc/self/ns/net').st_ino}"


def _reach(first: Endpoint, own: Endpoint, longest_s: float = 0.0) -> str:
    """Why rank 0 cannot be reached from here for ``longest_s``, or nobody can reach this rank; else empty."""
    if not own.addresses:
        return f"{own.host} has no network address that other nodes can reach"
    patience = Patience(longest_s, time.monotonic())
    pause_s: float | None = 0.0
    while pause_s is not None:
        time.sleep(pause_s)
        for address in first.addresses:
            with contextlib.suppress(OSError):
                socket.create_connection((address, first.port), timeout=REACH_S).close()
                return ""
        pause_s = patience.failed(time.monotonic())
    tried = ", ".join(f"{address} port {first.port}" for address in first.addresses) or "no address"
    return (
        f"{own.host} cannot reach the planner's node {first.host} ({tried}): set slurm.interface to a network that all"
        " nodes share"
    )


def _exchange(meeting: Meeting, record: Record) -> list[Record]:
    return [_DECODERS[type(record)].decode(one) for one in meeting.gather(msgspec.msgpack.encode(record))]


def _agree(meeting: Meeting, own: _Report) -> list[_Report]:
    """Raise on every rank or on none: all see the same problems."""
    reports = _exchange(meeting, own)
    for report in reports:
        if report.problem:
            raise NoWorld(report.problem, meeting.rank)
    return reports
