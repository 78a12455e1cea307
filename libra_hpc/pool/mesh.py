"""The mesh: point-to-point messages between node agents over MPI, driven by the agent's asyncio loop.

A message is one msgpack frame of the closed union `libra_hpc.protocol.mesh`; it may carry one *blob* (raw bytes, zero copy on the sender's side), which
follows as an MPI message of its own.  A dead peer never blocks a live one: every MPI call is nonblocking, a send that a peer never takes is forgotten
after `SEND_DEADLINE_S`, and a half-received message of a peer that was declared lost is dropped.

MPI has no descriptor to wait on, so the mesh polls.  The pause between two polls is `POLL_SHARE` = 5 % of the time since the last message, but at least
`POLL_MIN_S` and at most `POLL_MAX_S`: polling lengthens an exchange of messages by a twentieth or by a millisecond a hop, whichever is more, and an idle
agent costs well under one percent of a core.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import mpi4py
import msgspec

from libra_hpc.protocol.codec import FrameError
from libra_hpc.protocol.mesh import MeshMessage
from libra_hpc.protocol.mesh import mesh as codec

# `meet` does it, under a deadline.
mpi4py.rc.initialize = False

from mpi4py import MPI  # noqa: E402  (the choice must be made first)

__all__ = ["MPI", "Mesh", "meet"]

MEET_S = 90
"""A start takes seconds; nodes that load Python from a cold shared file system come up to a minute apart."""

TAG_FRAME = 7
TAG_BLOB = 8
POLL_MIN_S = 0.0005
POLL_MAX_S = 0.03
POLL_SHARE = 0.05
SEND_DEADLINE_S = 60.0
"""A live agent takes a message within milliseconds; after a minute its peer is dead or hopeless."""
BURST = 64
"""Messages handled before the loop's other tasks get their turn."""

Handler = Callable[[int, Any, bytes], None]


class _Envelope(msgspec.Struct, array_like=True):
    """What precedes a blob on the wire."""

    blob: int
    body: msgspec.Raw


_envelope_encoder = msgspec.msgpack.Encoder()
_envelope_decoder = msgspec.msgpack.Decoder(_Envelope)


def meet() -> MPI.Intracomm:
    """Join the world: returns it once every rank is there.

    A rank that fails to connect leaves the others waiting inside MPI for ever, where no Python runs; so the kernel ends this process with SIGALRM when it takes
    longer than `MEET_S`, and whoever started it may try again.
    """
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(MEET_S)
    MPI.Init_thread(MPI.THREAD_SINGLE)
    comm = MPI.COMM_WORLD
    comm.Barrier()
    signal.alarm(0)
    return comm


def pause(quiet_s: float) -> float:
    """Seconds until the next poll, ``quiet_s`` after the last message."""
    return min(POLL_MAX_S, max(POLL_MIN_S, POLL_SHARE * quiet_s))


class Mesh:
    """One agent's end of the mesh.  Messages to the own rank take the same path through the handler, without MPI."""

    def __init__(self, comm: MPI.Intracomm, handler: Handler) -> None:
        self.comm, self.rank, self.size = comm, comm.Get_rank(), comm.Get_size()
        self._handler = handler
        self._sends: deque[tuple[float, MPI.Request, Any]] = deque()
        self._receiving: list[tuple[MPI.Request, int, bytearray, bytes | None]] = []
        self._lost: set[int] = set()
        self._local: deque[tuple[MeshMessage, bytes]] = deque()
        self._woken = asyncio.Event()
        self.rejected = 0
        """Frames that did not decode; counted, reported, otherwise ignored."""

    def send(self, dest: int, message: MeshMessage, blob: bytes | memoryview = b"") -> None:
        """Queue a message; never blocks.  A message to a lost rank is dropped."""
        if dest == self.rank:
            self._local.append((message, bytes(blob)))
            self._woken.set()
            return
        if dest in self._lost:
            return
        size = len(blob)
        frame = _envelope_encoder.encode(_Envelope(size, msgspec.Raw(codec.encode(message))))
        now = time.monotonic()
        self._sends.append((now, self.comm.Isend([frame, MPI.BYTE], dest, TAG_FRAME), frame))
        if size:
            self._sends.append((now, self.comm.Isend([blob, MPI.BYTE], dest, TAG_BLOB), blob))
        self._woken.set()

    def forget(self, rank: int) -> None:
        """Drop everything to and from a rank that was declared lost."""
        self._lost.add(rank)
        self._receiving = [r for r in self._receiving if r[1] != rank]

    async def run(self) -> None:
        """Deliver messages until cancelled."""
        loop = asyncio.get_running_loop()
        active = loop.time()
        while True:
            if self._poll():
                active = loop.time()
                await asyncio.sleep(0)
                continue
            self._woken.clear()
            # `call_later` costs a quarter of `wait_for`, and this runs for ever.
            timer = loop.call_later(pause(loop.time() - active), self._woken.set)
            await self._woken.wait()
            if timer.when() > loop.time():
                # Something was sent: an answer may come soon.
                active = loop.time()
            timer.cancel()

    async def drain(self, seconds: float) -> None:
        """Keep polling until every queued send was taken, at most ``seconds``."""
        deadline = time.monotonic() + seconds
        while self._sends and time.monotonic() < deadline:
            self._poll()
            await asyncio.sleep(POLL_MIN_S)

    def _poll(self) -> int:
        handled = 0
        while self._local and handled < BURST:
            message, blob = self._local.popleft()
            self._handler(self.rank, message, blob)
            handled += 1
        status = MPI.Status()
        while handled < BURST:
            incoming = self.comm.Improbe(MPI.ANY_SOURCE, TAG_FRAME, status)
            if incoming is None:
                break
            buffer = bytearray(status.Get_count(MPI.BYTE))
            self._receiving.append((incoming.Irecv([buffer, MPI.BYTE]), status.Get_source(), buffer, None))
            handled += self._advance()
        handled += self._advance()
        self._reap()
        return handled

    def _advance(self) -> int:
        """Complete receives in arrival order per source; a frame that announces a blob posts the blob's receive in its place."""
        done = 0
        blocked: set[int] = set()
        remaining = []
        for request, source, buffer, header in self._receiving:
            if source in blocked or not request.Test():
                blocked.add(source)
                remaining.append((request, source, buffer, header))
                continue
            if header is not None:
                self._deliver(source, header, bytes(buffer))
                done += 1
                continue
            try:
                envelope = _envelope_decoder.decode(buffer)
            except msgspec.DecodeError:
                self.rejected += 1
                continue
            if envelope.blob:
                blob = bytearray(envelope.blob)
                blocked.add(source)
                remaining.append((self.comm.Irecv([blob, MPI.BYTE], source, TAG_BLOB), source, blob, bytes(envelope.body)))
            else:
                self._deliver(source, bytes(envelope.body), b"")
                done += 1
        self._receiving = remaining
        return done

    def _deliver(self, source: int, body: bytes, blob: bytes) -> None:
        if source in self._lost:
            return
        try:
            message = codec.decode(body)
        except FrameError:
            self.rejected += 1
            return
        self._handler(source, message, blob)

    def _reap(self) -> None:
        if not self._sends:
            return
        now = time.monotonic()
        self._sends = deque(s for s in self._sends if not s[1].Test() and now - s[0] < SEND_DEADLINE_S)
