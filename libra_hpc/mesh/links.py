"""Byte streams between the agents: one TCP connection per sender and receiver, opened for the first message.

On the wire: a proof that both ends have the run's secret, then frames (`Seal`): `HEADER`, that many bytes, and a tag
that proves them and their place in the stream.

- A peer does not read (stopped, slow network) -> what is sent to it waits without limit.
- A connection breaks, or every address refuses -> what waits is dropped, and what is sent later: no stream has holes.
- The receiver closes one -> it broke, also where nothing waits: the last message may be lost.
- `Outgoing.reopen` -> a new stream begins.
- A caller that is no rank yet -> one question and its answer (`libra_hpc.protocol.joining`).
- A caller without the secret, a frame beyond `MAX_FRAME_BYTES`, or other bytes than were sent -> the connection is
  closed.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import socket
import struct
from collections import deque
from collections.abc import Callable
from typing import cast

from libra_hpc.process.child import spawn
from libra_hpc.process.owner_link import keep_alive
from libra_hpc.protocol.callers import (
    MOST_UNPROVEN,
    PROOF_BYTES,
    PROVE_S,
    Handshake,
    T,
    Unproven,
    called_by,
    calling,
    proof,
    proves,
)
from libra_hpc.protocol.joining import AT_THE_DOOR, is_guest

from .world import Endpoint, World

HEADER = struct.Struct("<I")
"""Bytes of the frame that follows."""
COUNT = struct.Struct("<Q")
ANSWER = b"answer"
"""Direction of what rank 0 answers; all other frames go the other way."""
REFUSALS = 3
"""A rank that was stopped while it connected is turned away once; a fourth attempt would find what the third did."""
PAUSE_S = 0.2
"""Between two rounds over the addresses, and after a caller that was not accepted."""
JOIN_BYTES = 1 << 16
"""Small messages that wait are sent with one call of the kernel, up to this size."""
TURN_BYTES = 4 << 20
"""Bytes after which the loop's other tasks run: 2 to 4 ms of copying."""
TURN_MESSAGES = 64
"""Messages after which they run."""
MAX_FRAME_BYTES = 1 << 30
"""Far beyond what a peer of this protocol sends; a longer one closes the connection."""

Deliver = Callable[[int, bytes], None]
"""Gets (rank, frame) of each message, in the sender's order."""
Admit = Callable[[bytes], bytes]
"""Answers the frame of a caller that wants to join."""

log = logging.getLogger("libra_hpc.links")


class Outgoing:
    """This rank's messages to one other; `put` never blocks."""

    def __init__(self, world: World, peer: int, broken: Callable[[int], None]) -> None:
        self._world, self._peer, self._on_broken = world, peer, broken
        self._queue: deque[bytes] = deque()
        self._task: asyncio.Task[None] | None = None
        self._socket: socket.socket | None = None
        self._seal = Seal(b"")
        """The one of the socket's stream."""
        self._closed = False
        """Whether the receiver has closed it."""
        self.broken = False
        self.pending = 0

    def put(self, frame: bytes) -> None:
        """Queue one message."""
        if self.broken:
            return
        self._queue.append(frame)
        self.pending += len(frame)
        self._run()

    def reopen(self) -> None:
        """Begin a new stream at the next message, if the old one broke."""
        self.broken = False

    def _run(self) -> None:
        if self._task is None or self._task.done():
            self._task = spawn(self._serve())

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            if self._socket is None:
                self._socket, self._seal = await _connect(self._world, self._peer)
                self._closed = False
                # Nothing is received here, so it can be read once it is closed.
                loop.add_reader(self._socket, self._on_closed, self._socket)
            while self._queue and not self._closed:
                await self._send_some(loop, self._socket)
            if self._closed:
                raise ConnectionError("it was closed at the other end")
        except OSError as error:
            log.warning("the connection to rank %d broke: %s", self._peer, error)
            self._give_up()

    def _on_closed(self, stream: socket.socket) -> None:
        asyncio.get_running_loop().remove_reader(stream)
        self._closed = True
        self._run()

    async def _send_some(self, loop: asyncio.AbstractEventLoop, stream: socket.socket) -> None:
        """Send what waits, up to `JOIN_BYTES` or one message; it is in the queue until the kernel has all of it."""
        taken, joined = 0, bytearray()
        while taken < len(self._queue) and len(joined) <= JOIN_BYTES:
            await self._seal.put(joined, self._queue[taken])
            taken += 1
        for at in range(0, len(joined), TURN_BYTES):
            await loop.sock_sendall(stream, memoryview(joined)[at : at + TURN_BYTES])
            await asyncio.sleep(0)
        for _ in range(taken):
            self.pending -= len(self._queue.popleft())

    def _give_up(self) -> None:
        self.broken = True
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket)
            self._socket.close()
            self._socket = None
        self._queue.clear()
        self.pending = 0
        self._on_broken(self._peer)


async def accept(
    world: World, deliver: Deliver, admit: Admit | None = None, closed: Callable[[int], None] = lambda rank: None
) -> None:
    """Take callers and their messages; ``closed`` gets the rank whose stream has ended."""
    loop = asyncio.get_running_loop()
    streams: set[asyncio.Task[None]] = set()
    # All ranks may call at once.
    unproven = Unproven(MOST_UNPROVEN + world.size)
    try:
        while True:
            try:
                stream, _ = await loop.sock_accept(world.listener)
            except OSError as error:
                # A caller that was gone before it was served, or too many open files: others are served later.
                log.warning("a caller was not accepted: %s", error)
                await asyncio.sleep(PAUSE_S)
                continue
            task = spawn(_receive(world, stream, unproven, deliver, admit, closed))
            streams.add(task)
            task.add_done_callback(streams.discard)
    finally:
        for task in streams:
            task.cancel()


async def _receive(
    world: World,
    stream: socket.socket,
    unproven: Unproven,
    deliver: Deliver,
    admit: Admit | None,
    closed: Callable[[int], None],
) -> None:
    def secret_with(rank: int) -> bytes | None:
        known = rank < world.size or (admit is not None if rank == AT_THE_DOOR else is_guest(rank))
        return world.secret_with(rank) if known else None

    source = AT_THE_DOOR
    try:
        reader = _Reader(stream)
        async with asyncio.timeout(PROVE_S):
            with unproven.proving(stream):
                source, key = await _shake(called_by(b"mesh", secret_with, world.rank), stream, reader)
            seal = Seal(key)
            if source == AT_THE_DOOR and admit is not None:
                answer = admit(await seal.frame(reader, JOIN_BYTES))
                await _send(stream, Seal(key, ANSWER), answer)
                return
        taken = messages = 0
        while True:
            frame = await seal.frame(reader, MAX_FRAME_BYTES)
            deliver(source, frame)
            taken, messages = taken + len(frame), messages + 1
            if taken > TURN_BYTES or messages >= TURN_MESSAGES or not reader.buffered:
                taken = messages = 0
                await asyncio.sleep(0)
    except (OSError, TimeoutError, EOFError) as error:
        if str(error):
            log.warning("a connection ended: %s", error)
    finally:
        stream.close()
        closed(source)


async def _send(stream: socket.socket, seal: Seal, frame: bytes) -> None:
    sealed = bytearray()
    await seal.put(sealed, frame)
    await asyncio.get_running_loop().sock_sendall(stream, sealed)


async def call_door(world: World, frame: bytes) -> bytes:
    """Have rank 0 answer a frame of this agent, which has no rank yet.

    Raises `OSError` where nobody answers, `EOFError` where rank 0 closes the connection: it has another secret.
    """
    failure, stream = OSError("it has no address"), None
    for address in world.endpoints[0].addresses:
        try:
            stream, key = await _open(world, 0, world.endpoints[0], address)
            break
        except OSError as error:
            failure = error
    if stream is None:
        raise failure
    try:
        async with asyncio.timeout(PROVE_S):
            await _send(stream, Seal(key), frame)
            return await Seal(key, ANSWER).frame(_Reader(stream), MAX_FRAME_BYTES)
    finally:
        stream.close()


class _Reader:
    """Exact reads from a nonblocking socket, in no more memory than twice what has come."""

    def __init__(self, stream: socket.socket) -> None:
        stream.setblocking(False)
        self._stream, self.buffered = stream, bytearray()

    async def exactly(self, count: int) -> bytes:
        since = 0
        while len(self.buffered) < count:
            size = min(max(count - len(self.buffered), JOIN_BYTES), TURN_BYTES)
            more = await asyncio.get_running_loop().sock_recv(self._stream, size)
            if not more:
                raise EOFError
            self.buffered += more
            since += len(more)
            if since >= TURN_BYTES:
                since = 0
                await asyncio.sleep(0)
        with memoryview(self.buffered) as view:
            data = bytes(view[:count])
        del self.buffered[:count]
        return data


class Seal:
    """Frames of one direction of a stream: on the way none can be changed, put in, left out, repeated or exchanged."""

    def __init__(self, key: bytes, direction: bytes = b"") -> None:
        """``key``: of the stream."""
        self._key, self._direction, self._count = key, direction, 0

    async def put(self, buffer: bytearray, frame: bytes) -> None:
        """Append the next frame as it is sent."""
        buffer += HEADER.pack(len(frame))
        buffer += frame
        buffer += proof(self._key, b"frame", await self._digest(frame))

    async def frame(self, reader: _Reader, most: int) -> bytes:
        """The next frame that comes; raises `ConnectionError` for any other, and beyond ``most`` bytes."""
        (frame_bytes,) = HEADER.unpack(await reader.exactly(HEADER.size))
        if frame_bytes > most:
            raise ConnectionError(f"a caller announces a frame of {frame_bytes} bytes")
        frame = await reader.exactly(frame_bytes)
        if not proves(await reader.exactly(PROOF_BYTES), self._key, b"frame", await self._digest(frame)):
            raise ConnectionError(f"frame {self._count} of a stream is not the one that was sent")
        return frame

    async def _digest(self, frame: bytes) -> bytes:
        self._count += 1
        digest = hashlib.sha256(self._direction + COUNT.pack(self._count))
        for at in range(0, len(frame), TURN_BYTES):
            if at:
                await asyncio.sleep(0)
            digest.update(memoryview(frame)[at : at + TURN_BYTES])
        return digest.digest()


async def _connect(world: World, peer: int) -> tuple[socket.socket, Seal]:
    """A proven connection to a rank.  A silent address is tried again without limit: the rank may be stopped.

    Raises `ConnectionError` when every address has refused `REFUSALS` times.
    """
    refusals, why = 0, ""
    while (endpoint := world.endpoint(peer)) is None:
        await asyncio.sleep(PAUSE_S)
    while refusals < REFUSALS:
        silent = False
        for address in endpoint.addresses:
            try:
                stream, key = await _open(world, peer, endpoint, address)
                return stream, Seal(key)
            except TimeoutError:
                silent = True
            except (OSError, EOFError) as error:
                why = str(error) or "closed"
        if not silent:
            refusals += 1
            await asyncio.sleep(PAUSE_S)
    raise ConnectionError(
        f"{endpoint.host} answers at none of {', '.join(endpoint.addresses)}, port {endpoint.port} ({why})"
    )


async def _open(world: World, peer: int, endpoint: Endpoint, address: str) -> tuple[socket.socket, bytes]:
    """A proven connection, and the key of its stream."""
    stream = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    try:
        stream.setblocking(False)
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        keep_alive(stream)
        async with asyncio.timeout(PROVE_S):
            await asyncio.get_running_loop().sock_connect(stream, (address, endpoint.port))
            handshake = calling(b"mesh", world.secret_with(peer), world.rank, peer)
            return stream, await _shake(handshake, stream, _Reader(stream))
    except BaseException:
        stream.close()
        raise


async def _shake(handshake: Handshake[T], stream: socket.socket, reader: _Reader) -> T:
    loop, got = asyncio.get_running_loop(), None
    try:
        while True:
            step = handshake.send(got)
            got = await (reader.exactly(step) if isinstance(step, int) else loop.sock_sendall(stream, step))
    except StopIteration as done:
        return cast(T, done.value)
