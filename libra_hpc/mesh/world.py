"""How the agents find each other: MPI numbers them and carries their addresses, at the start.

MPI is in a process beside each agent (`libra_hpc.mesh.mpi_process`), because no MPI survives a dead member
(docs/network.md).  Messages go over sockets of our own (`libra_hpc.mesh.links`), Layouts by MPI.

- All ranks on one machine, and no guests wanted -> they listen on loopback.  Otherwise on `slurm.interface`, or on
  every interface.
- Rank 0 draws a secret for the run; who connects must prove that it has it.
- A rank that cannot reach rank 0 -> every rank raises the same sentence.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import psutil

from libra_hpc.errors import OperationError
from libra_hpc.process.addresses import listen, loopback, own_addresses
from libra_hpc.process.retry import Patience
from libra_hpc.protocol.codec import LENGTH
from libra_hpc.protocol.joining import guest_secret

from .mpi_link import MpiLink, NoWorld
from .mpi_process import RECORD_BYTES

REACH_S = 5.0
"""For one address of rank 0 to answer.

Half: a busy switch looks like a wrong address; double: several wrong ones use up `MEET_S`.
"""
REACH_AGAIN_S = 60.0
"""For any address of rank 0 to answer where the ranks have met before: a switch restarts in a minute.

Half: the ranks start more often meanwhile; double: longer than `MEET_S`.
"""
SECRET_BYTES = 32


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
    link: MpiLink | None = None
    """The process that met those of the other ranks; None in the world of a guest."""

    @property
    def size(self) -> int:
        return len(self.endpoints)

    def endpoint(self, rank: int) -> Endpoint | None:
        """None of a guest that was not announced yet."""
        return self.endpoints[rank] if rank < self.size else self.guests.get(rank)

    def secret_with(self, peer: int) -> bytes:
        """What a rank and a peer prove themselves with; a guest has no other secret than that of guests."""
        return guest_secret(self.secret) if self.rank < self.size <= peer else self.secret


class _Place(msgspec.Struct):
    """First round: a rank's machine, and why it cannot go on, if so."""

    machine: str
    problem: str = ""


class _Reached(msgspec.Struct):
    """Last round: why rank 0 is out of reach; empty where it is not."""

    problem: str


_DECODERS: dict[type, msgspec.msgpack.Decoder[Any]] = {
    kind: msgspec.msgpack.Decoder(kind) for kind in (_Place, Endpoint, _Reached)
}
Record = TypeVar("Record", _Place, Endpoint, _Reached)


def meet(
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

    The same where the ranks have not come together within `MEET_S`: whoever started them may try again.
    """
    link = MpiLink()
    rank, size = link.met()
    addresses = own_addresses(interface)
    if interface and not addresses:
        problem = (
            problem
            or f"slurm.interface = {interface!r}: {socket.gethostname()} has no such interface with an address; "
            f"it has {', '.join(sorted(psutil.net_if_addrs()))}"
        )
    places = _exchange(link, _Place(_machine(), problem))
    _raise_first(link, rank, [place.problem for place in places])
    if interface:
        addresses = addresses[:1]
    elif len({place.machine for place in places}) == 1 and not guests:
        addresses = [loopback()]
    listener = listen(addresses, 2 * size)
    listener.setblocking(False)
    own = Endpoint(socket.gethostname(), tuple(addresses), listener.getsockname()[1], parts(rank))
    endpoints = _exchange(link, own)
    secret = link.ask(b"B", secrets.token_bytes(SECRET_BYTES))
    reached = _reach(endpoints[0], endpoints[rank], REACH_AGAIN_S if again else 0.0)
    _raise_first(link, rank, [one.problem for one in _exchange(link, _Reached(reached))])
    return World(rank, tuple(endpoints), secret, listener, link=link)


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


def _exchange(link: MpiLink, record: Record) -> list[Record]:
    body = msgspec.msgpack.encode(record)
    encoded = LENGTH.pack(len(body)) + body
    if len(encoded) > RECORD_BYTES:
        raise OperationError(
            f"the record of {socket.gethostname()} takes {len(encoded)} bytes; there is room for {RECORD_BYTES}"
        )
    everyone = link.ask(b"G", encoded)
    decoder = _DECODERS[type(record)]
    found = []
    for at in range(0, len(everyone), RECORD_BYTES):
        start = at + LENGTH.size
        found.append(decoder.decode(everyone[start : start + LENGTH.unpack_from(everyone, at)[0]]))
    return found


def _raise_first(link: MpiLink, rank: int, problems: list[str]) -> None:
    """Raise on every rank or on none: all see the same problems."""
    for problem in problems:
        if problem:
            link.finish()
            raise NoWorld(problem, rank)
