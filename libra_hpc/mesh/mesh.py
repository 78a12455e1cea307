"""The mesh: messages between node agents, driven by the agent's asyncio loop.

A message is one msgpack frame of the closed union `libra_hpc.protocol.agents`.  A dead peer never blocks or harms a
live one.

- A send waits until the kernel has taken it, however long that takes.
- `drop` -> sends to the rank are dropped; what comes from it goes to `Mesh.from_lost`.
- `remember` -> the rank is a peer again.
- The connection to a rank breaks -> sends to it are dropped, and it is in `Mesh.unreachable`, until `remember`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from typing import Any

from libra_hpc.protocol.agents import MeshMessage
from libra_hpc.protocol.agents import mesh as codec
from libra_hpc.protocol.codec import FrameError

from .links import Admit, Outgoing, accept
from .world import Endpoint, World

HEAD_BYTES = 32
"""First bytes of an unreadable message that are shown."""
DRAIN_S = 0.005
"""Between two checks of what waits, when an agent leaves."""

SETTLE_S = 3.0
"""From a broken connection to its report: if the process at the other end ended, its launcher reports that first."""

Handler = Callable[[int, Any], object]


class Mesh:
    """One agent's end of the mesh.  Messages to the own rank go to the handler without a stream."""

    def __init__(self, world: World, handler: Handler) -> None:
        self.rank, self.size = world.rank, world.size
        self._world, self._handler = world, handler
        self.hosts = [name for one in world.endpoints for name in (one.host, *one.addresses)]
        """Names and addresses of the nodes of this start."""
        self._links: dict[int, Outgoing] = {}
        self._lost: set[int] = set()
        self._broke: dict[int, float] = {}
        self.from_lost: Callable[[int, Any], None] | None = None
        """Gets (rank, message) of a dropped rank; without it they are discarded."""
        self.admit: Admit | None = None
        """Rank 0's answer to agents that want to join."""
        self.on_closed: Callable[[int], None] = lambda rank: None
        """Gets the rank whose stream has ended."""
        self.on_rejected: Callable[[int, str], None] | None = None
        """Gets (rank, sentence) of the first one of every rank."""
        self._rejected_of: set[int] = set()

    def send(self, dest: int, message: MeshMessage) -> None:
        if dest == self.rank:
            asyncio.get_running_loop().call_soon(self._handler, dest, message)
        elif dest not in self._lost:
            link = self._links.get(dest)
            if link is None:
                link = self._links[dest] = Outgoing(self._world, dest, self._on_broken)
            link.put(codec.encode(message))

    def add_guest(self, rank: int, endpoint: Endpoint) -> None:
        """An agent joined that was not there at the start."""
        self._world.guests[rank] = endpoint

    def drop(self, rank: int) -> None:
        """Treat a rank as lost.

        What it is sending is read to its end: half a frame would be taken for another one.
        """
        self._lost.add(rank)

    def remember(self, rank: int) -> None:
        """Make a dropped rank a peer again, which has nothing of what was sent before."""
        self._lost.discard(rank)
        self._broke.pop(rank, None)
        self.reopen(rank)

    def reopen(self, rank: int) -> None:
        """Try a broken connection again; the rank stays `unreachable`, because messages were lost."""
        if rank in self._links:
            self._links[rank].reopen()

    def unreachable(self) -> tuple[int, ...]:
        """Ranks to which the connection broke at least `SETTLE_S` ago."""
        now = time.monotonic()
        return tuple(rank for rank, broke in self._broke.items() if now - broke >= SETTLE_S)

    def pending(self, rank: int) -> int:
        return self._links[rank].pending if rank in self._links else 0

    async def run(self) -> None:
        await accept(self._world, self._deliver, self.admit, lambda rank: self.on_closed(rank))

    async def drain(self, seconds: float, ended: Collection[int] = ()) -> None:
        """Wait at most ``seconds`` until the kernel has every message to ranks that are neither lost nor ``ended``."""
        deadline = time.monotonic() + seconds
        while any(map(self.pending, self._links.keys() - self._lost - {*ended})) and time.monotonic() < deadline:
            await asyncio.sleep(DRAIN_S)

    def _on_broken(self, rank: int) -> None:
        self._broke[rank] = time.monotonic()

    def _deliver(self, source: int, body: bytes) -> None:
        if source in self._lost and self.from_lost is None:
            return
        try:
            message = codec.decode(body)
        except FrameError as error:
            if source not in self._rejected_of and self.on_rejected is not None:
                self._rejected_of.add(source)
                head = body[:HEAD_BYTES].hex()
                self.on_rejected(source, f"a message of {len(body)} bytes cannot be read ({error}): {head}")
            return
        if source not in self._lost:
            self._handler(source, message)
        elif self.from_lost is not None:
            self.from_lost(source, message)
