"""How rank 0 gets a Layout to every node: as changes, by MPI, and by stream where MPI does not bring them.

- MPI has not met yet -> the first Layout waits for it, up to `FIRST_S`, unless a process has ended.
- Something has changed -> the next number, at most one every `FRAME_S`.
- A number -> what differs from the frame before goes to the own MPI process, which sends it to all that it reaches.
  While one is on its way through that process, newer ones wait, and one frame has what differs in them.
- Nothing has changed for a while -> the number and its sum alone, by the same ways.
- A node has not echoed a number for `ECHO_S`, or `BEAT_S` if its row is as it was -> it gets what differs from the one
  in its heartbeat by stream, and so later ones, until an echo shows that MPI brought one.
- A node's MPI process ended, its stream closed, or it is lost -> the own one leaves it out before the next frame.
- The own process ended, or did not pass a frame on for `ACK_S` -> all nodes get streams.
- MPI does not reach a node that lives for `RELINK_S` -> new processes on all such nodes, at most every
  `RELINK_EVERY_S`.

A frame proves itself with the run's secret.  Guests get streams alone.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterable
from functools import cache
from math import inf
from typing import Any

from libra_hpc.facts.layout_log import layout_line
from libra_hpc.protocol.agents import Heartbeat, MpiBarrier, MpiStart
from libra_hpc.protocol.agents import mesh as codec
from libra_hpc.protocol.callers import PROOF_BYTES, proof, proves
from libra_hpc.protocol.codec import FrameError
from libra_hpc.protocol.layout import Layout, LayoutChange
from libra_hpc.protocol.layout_changes import LayoutHistory

from .mesh import Mesh
from .mpi_link import MpiLink

FRAME_S = 0.05
"""Half: a start of 1,024 nodes has twice the frames; double: an order waits as long."""
ECHO_S, BEAT_S = 0.5, 2.5
"""Until the echo of a node whose row has changed, and of others, which echo with their heartbeat, once a second.

Frames take 2 ms, and 20 to an idle process.  Half: busy nodes get both ways; double: an order comes later.
"""
ACK_S = 1.5
"""Until the own process has passed a frame on; a stopped one is noticed by it."""
CHECK_S = 0.1
"""Between two checks of echoes."""
FIRST_S = 5.0
"""Until the first Layout waits no longer for MPI, which takes a second.  Half: slow starts do without MPI for a minute;
double: so long does a run wait whose MPI hangs."""
RELINK_S, RELINK_EVERY_S = 10.0, 60.0
"""Until new processes start, and between two tries: what broke MPI may break it again."""


def sealed(secret: bytes, change: LayoutChange) -> bytes:
    body = codec.encode(change)
    return proof(secret, b"layout", body) + body


def opened(secret: bytes, frame: bytes) -> LayoutChange | None:
    """The change of a frame; None where somebody without the secret made it."""
    body = frame[PROOF_BYTES:]
    if not proves(frame[:PROOF_BYTES], secret, b"layout", body):
        return None
    try:
        change = codec.decode(body)
    except FrameError:
        return None
    return change if isinstance(change, LayoutChange) else None


class Publisher:
    """``event(kind, **fields)`` writes to the event log, ``record(line)`` to that of Layouts; the MPI processes of all
    ranks are about to meet."""

    def __init__(
        self, mesh: Mesh, secret: bytes, event: Callable[..., None], record: Callable[[dict[str, Any]], None]
    ) -> None:
        self._mesh, self._secret, self._event, self._record = mesh, secret, event, record
        self._world = 0
        """Number of the present MPI processes: they are replaced together."""
        self._members: tuple[int, ...] = tuple(range(mesh.size))
        """Rank of each of them."""
        self._published, self._sent = LayoutHistory(), 0
        """What is to be, and the number of the last frame for the own process."""
        self._waiting: tuple[Layout, Collection[int]] | None = None
        """What gets the next number, and who gets it; None: nothing waits."""
        self._frame_at = -inf
        self._ranks: Collection[int] = ()
        """Nodes that get it."""
        self._nodes = set[int]()
        """The nodes out of these that MPI is to reach: neither this one nor guests."""
        self._shown: dict[int, int] = {}
        """The number that a node has, by its heartbeat."""
        self._owed: dict[int, tuple[int, float]] = {}
        """The first number that a node has not echoed, and until when it may be silent."""
        self._late: set[int] = set()
        self._ways, self._turned = dict[int, str](), dict[int, str]()
        """By which way each node got its Layout, ``mpi`` or ``stream``; and what of it is not in the log of Layouts."""
        self._whole_at = self._tried_at = time.monotonic()
        """When MPI last reached all nodes, and when new processes were last started."""
        self._inside: dict[int, tuple[bytes, ...]] = {}
        """Members in a barrier, and what they have put."""
        self._link: MpiLink | None = None
        self._reached, self._gone = set[int](), set[int]()
        """Members that MPI reaches, and that it never will."""
        self._given_at, self._behind = inf, False
        """When the own process got the frame that it has not passed on, and whether a newer Layout waits for that."""
        self._starting = True
        """Whether Layouts wait until the first processes have met."""

    @property
    def summary(self) -> str:
        """How Layouts go, in words."""
        others = {rank for rank in self._ranks if rank != self._mesh.rank}
        by_stream = sorted(others - self._reached | self._late & others)
        some = f"by MPI, to {', '.join(map(str, by_stream))} by stream"
        return "by MPI" if not by_stream else some if others.difference(by_stream) else "by stream"

    def linked(self, link: MpiLink) -> None:
        """The MPI processes of all members have met."""
        self._link, self._given_at, self._behind = link, inf, False
        self._reached, self._late = {*self._members} - self._gone - {self._mesh.rank}, set()
        self._event("mpi_world", nodes=len(self._reached) + 1, lost=sorted(self._gone.intersection(self._members)))
        if self._starting:
            # What meets at the start can meet again: the first loss is healed at once.
            self._tried_at = -inf
        self._go_on()

    def _go_on(self) -> None:
        """The first processes have met, or do not."""
        if self._starting:
            self._starting = False
            self._flush()

    def publish(self, layout: Layout, ranks: Collection[int]) -> None:
        """Have these nodes become what a Layout says, or say it again; the number is given here, the newest wins."""
        first, self._waiting = self._waiting is None, (layout, ranks)
        wait_s = self._frame_at + FRAME_S - time.monotonic()
        if wait_s <= 0.0:
            self._flush()
        elif first:
            asyncio.get_running_loop().call_later(wait_s, self._flush)

    def _flush(self) -> None:
        if self._waiting is None or self._starting:
            return
        (layout, ranks), self._waiting, now = self._waiting, None, time.monotonic()
        before, self._frame_at = self._newest, now
        if self._published.put(layout) or self._turned:
            self._record(layout_line(time.time(), self._published.since(before), self._turned))
            self._turned = {}
        self._ranks, self._nodes = ranks, {rank for rank in ranks if 0 < rank < self._mesh.size}
        for lost in self._reached.difference(ranks):
            self.leave_out(lost)
        self._send_newest()
        self._stream(set(ranks).difference(self._reached - self._late))
        if self._newest > before:
            for rank in self._reached:
                number, until = self._owed.get(rank, (self._newest, inf))
                self._owed[rank] = number, min(until, now + self._patience_s(rank, before))

    @property
    def _newest(self) -> int:
        return self._published.layout.number

    def _patience_s(self, rank: int, number: int) -> float:
        """Until the echo of a node that had this number."""
        return ECHO_S if self._published.changed(rank) > number else BEAT_S

    def _send_newest(self) -> None:
        """By MPI, once the own process has passed on the frame before; what is newer by then goes with it."""
        self._behind = self._given_at < inf
        if self._link is not None and self._reached and not self._behind:
            self._given_at = time.monotonic()
            self._link.send(sealed(self._secret, self._published.since(self._sent)))
            self._sent = self._newest

    def _stream(self, ranks: Iterable[int]) -> None:
        """What differs from the number that each node has."""
        since = cache(self._published.since)
        for rank in ranks:
            self._mesh.send(rank, since(self._shown.get(rank, 0)))

    def on_beat(self, rank: int, beat: Heartbeat) -> None:
        """A node shows which Layout it has, by which way, and whether its MPI process lives."""
        self._shown[rank] = beat.layout
        if beat.layout >= self._owed.get(rank, (0, inf))[0]:
            self._owed.pop(rank, None)
            if beat.by_mpi:
                self._late.discard(rank)
        if beat.layout < self._newest and rank not in self._owed:
            self._owed[rank] = beat.layout + 1, time.monotonic() + self._patience_s(rank, beat.layout)
        way = "mpi" if beat.by_mpi else "stream"
        if beat.layout and rank in self._nodes and self._ways.get(rank) != way:
            self._ways[rank] = self._turned[rank] = way
        if beat.ended_world >= self._world:
            self.leave_out(rank)
            self._go_on()

    def leave_out(self, rank: int) -> None:
        """The MPI process of the node is gone, or may be."""
        self._gone.add(rank)
        if rank in self._reached and self._link is not None:
            self._reached.discard(rank)
            self._link.leave_out(self._members.index(rank))
            self._lost([rank])

    def on_ended(self) -> None:
        """The own MPI process is gone."""
        self._go_on()
        if self._link is not None:
            self._link, self._reached = None, set()
            self._lost(self._ranks)

    def on_passed_on(self) -> None:
        """The own process has sent a frame."""
        self._given_at = inf
        if self._behind:
            self._send_newest()

    async def watch(self) -> None:
        """Check echoes and the own process, until cancelled."""
        while True:
            await asyncio.sleep(CHECK_S)
            self.check(time.monotonic())

    def check(self, now: float) -> None:
        """Find late echoes, and an own process that hangs."""
        if self._link is not None and now - self._given_at > ACK_S:
            self._link.close()
        if now - self._tried_at > FIRST_S:
            self._go_on()
        by_mpi = self._reached - self._late
        late = {rank for rank, (_, until) in self._owed.items() if rank in by_mpi and now > until}
        self._late |= late
        self._stream(late)
        if self._reached >= self._nodes:
            self._whole_at = now
        elif now - self._whole_at > RELINK_S and now - self._tried_at > RELINK_EVERY_S:
            self._relink(now)

    def _lost(self, ranks: Collection[int]) -> None:
        """These nodes get streams, as far as they live."""
        self._stream(set(self._ranks).intersection(ranks))
        lives = self._link is not None
        self._event("mpi_world", nodes=len(self._reached) + 1 if lives else 0, lost=[*ranks] if lives else [])

    def _relink(self, now: float) -> None:
        """Start MPI processes on all nodes that live; they meet as the first ones did."""
        self._tried_at, self._world = now, self._world + 1
        self._link, self._reached, self._gone = None, set(), set()
        self._members, self._inside = tuple(rank for rank in sorted(self._ranks) if rank < self._mesh.size), {}
        for rank in self._members:
            self._mesh.send(rank, MpiStart(self._world, self._members))

    def on_barrier(self, inside: MpiBarrier) -> None:
        """The process of a member is in a barrier of its start.  Once all are, the own agent passes that on."""
        if inside.world == self._world and inside.rank in self._members:
            self._inside[inside.rank] = inside.values
            if len(self._inside) == len(self._members):
                values = tuple(one for own in self._inside.values() for one in own)
                self._inside = {}
                self._mesh.send(self._mesh.rank, MpiBarrier(self._world, values))
