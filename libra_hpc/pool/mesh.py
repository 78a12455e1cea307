"""The mesh: point-to-point messages between node agents over MPI, driven by the agent's asyncio loop.

A message is one msgpack frame of the closed union `libra_hpc.protocol.mesh`.  It may carry one *blob* (raw bytes, no
copy at the sender), an MPI message of its own.  Every MPI call is nonblocking, so a dead peer never blocks a live one.

- A send stays until MPI has taken it, however long that takes: slow is slow.  Its buffer lives as long.
- `forget` -> new sends to the rank are dropped; what comes from it goes to `Mesh.from_lost`, whole messages in order.
- `remember` -> the rank is a peer again.
- MPI reports an error (a peer died while its blob was read) -> counted in `Mesh.broken`, and everything goes on.  The
  bytes of that blob are arbitrary: who uses a blob has a checksum.

MPI has no descriptor to wait on, so the mesh polls.  The pause between two polls is `POLL_SHARE` = 5 % of the time since the last message, but at least
`POLL_MIN_S` and at most `POLL_MAX_S`: an idle agent costs well under one percent of a core.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

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
BURST = 64
"""Messages handled before the loop's other tasks get their turn."""

Handler = Callable[[int, Any, bytes], None]
Done = Callable[[bool], None]
"""Called once with True when the buffers of a message are free again, or with False when it was dropped."""


class _Posted(NamedTuple):
    """One MPI message that was handed to MPI; the buffer must live until the request has completed."""

    request: MPI.Request
    buffer: bytes | memoryview
    done: Done | None


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
        self._sends: dict[int, deque[_Posted]] = {}
        self._receiving: list[tuple[MPI.Request, int, bytearray, bytes | None]] = []
        self._lost: set[int] = set()
        self._local: deque[tuple[MeshMessage, bytes, Done | None]] = deque()
        self._woken = asyncio.Event()
        self.from_lost: Callable[[int, Any], None] | None = None
        """Gets (rank, message) of a forgotten rank; without it they are discarded."""
        self.rejected = 0
        """Frames that did not decode; counted, reported, otherwise ignored."""
        self.broken = 0
        """Errors that MPI reported."""

    def send(self, dest: int, message: MeshMessage, blob: bytes | memoryview = b"", done: Done | None = None) -> None:
        """Queue a message; never blocks.  A message to a forgotten rank is dropped."""
        if dest == self.rank:
            self._local.append((message, bytes(blob), done))
            self._woken.set()
            return
        if dest in self._lost:
            if done is not None:
                done(False)
            return
        frame = _envelope_encoder.encode(_Envelope(len(blob), msgspec.Raw(codec.encode(message))))
        queue = self._sends.setdefault(dest, deque())
        try:
            queue.append(_Posted(self.comm.Isend([frame, MPI.BYTE], dest, TAG_FRAME), frame, None if blob else done))
            if blob:
                queue.append(_Posted(self.comm.Isend([blob, MPI.BYTE], dest, TAG_BLOB), blob, done))
        except MPI.Exception:
            # The connection is broken: the peer is dead, and whoever misses it will declare it lost.
            self.broken += 1
            if done is not None:
                done(False)
        self._woken.set()

    def forget(self, rank: int) -> None:
        """A rank was declared lost.

        Its unfinished receives go on: a blob whose receive is gone would be matched to another frame when it is back.
        """
        self._lost.add(rank)

    def remember(self, rank: int) -> None:
        """Take a forgotten rank back."""
        self._lost.discard(rank)

    def pending(self, rank: int) -> int:
        """Bytes that were posted to a rank and not taken."""
        return sum(len(posted.buffer) for posted in self._sends.get(rank, ()))

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
        """Keep polling until the ranks that are not lost have taken every send, at most ``seconds``."""
        deadline = time.monotonic() + seconds
        while self._sends.keys() - self._lost and time.monotonic() < deadline:
            self._poll()
            await asyncio.sleep(POLL_MIN_S)

    def _poll(self) -> int:
        handled = 0
        while self._local and handled < BURST:
            message, blob, done = self._local.popleft()
            self._handler(self.rank, message, blob)
            if done is not None:
                done(True)
            handled += 1
        status = MPI.Status()
        while handled < BURST:
            incoming = self._incoming(status)
            if incoming is None:
                break
            buffer = bytearray(status.Get_count(MPI.BYTE))
            self._receiving.append((incoming.Irecv([buffer, MPI.BYTE]), status.Get_source(), buffer, None))
            handled += self._advance()
        handled += self._advance()
        self._reap()
        return handled

    def _incoming(self, status: MPI.Status) -> MPI.Message | None:
        try:
            return self.comm.Improbe(MPI.ANY_SOURCE, TAG_FRAME, status)
        except MPI.Exception:
            self.broken += 1
            return None

    def _completed(self, request: MPI.Request) -> bool:
        """Whether a request has completed.  An error may be another request's: each call makes all of them progress."""
        try:
            return request.Test()
        except MPI.Exception:
            self.broken += 1
            return False

    def _advance(self) -> int:
        """Complete receives in arrival order per source; a frame that announces a blob posts the blob's receive in its place."""
        done = 0
        blocked: set[int] = set()
        remaining = []
        for request, source, buffer, header in self._receiving:
            if source in blocked or not self._completed(request):
                blocked.add(source)
                remaining.append((request, source, buffer, header))
                continue
            if header is not None:
                self._deliver(source, header, bytes(buffer))
                done += 1
                continue
            try:
                envelope = _envelope_decoder.decode(buffer)
            except (msgspec.DecodeError, RecursionError):
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
        if source in self._lost and self.from_lost is None:
            return
        try:
            message = codec.decode(body)
        except FrameError:
            self.rejected += 1
            return
        if source not in self._lost:
            self._handler(source, message, blob)
        elif self.from_lost is not None:
            self.from_lost(source, message)

    def _reap(self) -> None:
        """Let go of what was taken, in the order of the sends; a callback may send again."""
        for dest, queue in list(self._sends.items()):
            for _ in range(len(queue)):
                if not self._completed(queue[0].request):
                    break
                posted = queue.popleft()
                if posted.done is not None:
                    posted.done(True)
            if not queue:
                del self._sends[dest]
