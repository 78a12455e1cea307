"""The wire between carriers: blocking TCP streams, one request at a time on each, in a budget of bandwidth.

A caller and a server prove to each other that they have the run's secret. Then the caller sends a `Fetch`, and the
server answers with frames of `HEADER` and bytes:

- MANIFEST: the manifest, whole, after its CRC32; DATA: the next bytes of the range that was asked for.
- WAITING: it has no more yet, and lives; ABSENT: it does not have the offer, and why.
- LEASED: version and CRC32 of the next bytes, which are a block of an image: the next block may have another version.

A server sends what has arrived so far (cut-through). A broken connection is noticed at once, a stopped peer after
`SILENT_S`: an answer has no longer pauses.
"""

from __future__ import annotations

import logging
import math
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import cast

import msgspec

from libra_hpc.checksum import crc32
from libra_hpc.protocol.callers import Handshake, T, calling
from libra_hpc.protocol.carriers import Peer

PIECES = 32
"""A second. Half: eight threads that wait for each other look stopped to their peers; double: more system calls."""
BURST_S = 0.2
"""Seconds of unused budget that may be spent at once. Half: pauses of the caller cost bandwidth; double: longer
bursts."""


class BandwidthPace:
    def __init__(self, bytes_per_s: float) -> None:
        """``bytes_per_s`` 0: no limit."""
        self._rate = bytes_per_s or math.inf
        self.most = max(1.0, self._rate / PIECES)
        """Bytes to move at once."""
        self._spent_until = -math.inf
        """When the budget will have made up for what was moved."""
        self._spending = threading.Lock()

    def wait(self, count: int) -> None:
        """Until ``count`` bytes may be moved."""
        with self._spending:
            now = time.monotonic()
            begin = max(self._spent_until, now - BURST_S)
            self._spent_until = begin + count / self._rate
        if begin > now:
            time.sleep(begin - now)


MANIFEST, DATA, WAITING, ABSENT, LEASED = range(5)
HEADER = struct.Struct("<BI")
LENGTH = CRC32 = struct.Struct("<I")
LEASE = struct.Struct("<iI")
IMAGE = "image"
"""Writer of what is a node's image: its tensors, one behind the other."""
MOST_FETCH = 4096
"""Bytes of a request; a longer one is not of this protocol."""
MOST_MANIFEST = 256 << 20
"""Bytes; 30B-A3B has 75,000 pieces of 100 bytes."""
SILENT_S = 1.5
"""Longest pause within an answer. Half: a busy node counts as stopped; double: a stopped one costs 3 s."""
WAITING_S = 0.3
"""Between two signs of life of a server that has no more bytes yet."""
IDLE_S = 10.0
"""For a live node to bring another byte; it may itself be looking for another node."""
CONNECT_S = 1.5
"""For one address to answer; within a cluster it takes a millisecond."""
FRAME_BYTES = 4 << 20
"""Most bytes of a frame: a millisecond of a fast network, and 80 ms of a slow one between two looks at the rest."""
READ_BYTES = BLOCK_BYTES = 1 << 20
"""Received at a time: what is done with them next finds them in the processor's cache.  A block of an image: its copy
keeps a writer waiting for a fifth of a millisecond."""
Came = Callable[[int, int, int], None]

log = logging.getLogger("libra_hpc.carrier")


class WireError(Exception):
    """The other end is not a carrier of this run, or does not keep to the protocol."""


class DamagedError(WireError):
    """What came is not what was sent."""


class Absent(Exception):
    """The other end does not have what was asked for."""


class Fetch(msgspec.Struct, frozen=True, array_like=True):
    """Bytes [begin, end) of an offer's payload; ``end`` = -1: its manifest.

    Those of an image have ``version`` or a newer one.
    """

    version: int
    writer: str
    begin: int = 0
    end: int = -1


_fetch = msgspec.msgpack.Decoder(Fetch)


class Caller:
    """Asks other carriers, with a connection for every request."""

    def __init__(self, rank: int, secret: bytes, pace: BandwidthPace | None = None) -> None:
        """``pace``: budget of all requests together."""
        self._rank, self._secret = rank, secret
        self._pace = pace or BandwidthPace(0.0)

    def manifest(self, peer: Peer, fetch: Fetch) -> bytes:
        """Raises `OSError`, `WireError`, also for bytes that were changed on the way, and `Absent`."""
        with call(peer, self._rank, self._secret) as stream:
            send_fetch(stream, fetch)
            kind, length = next(frames(stream))
            if kind != MANIFEST:
                raise WireError("bytes came for a manifest")
            data = read(stream, length)
        if CRC32.pack(crc32(data[CRC32.size :])) != data[: CRC32.size]:
            raise DamagedError("The manifest has another checksum.")
        return data[CRC32.size :]

    def receive(
        self,
        peer: Callable[[], Peer],
        fetch: Fetch,
        payload: memoryview,
        arrived: Came,
        failed: Callable[[Exception], None],
    ) -> None:
        """The range of ``fetch`` into its place in ``payload``, from whom ``peer`` names before each try.

        ``arrived`` gets [begin, end) of what came, and its version; ``failed`` gets why a try ended, as `manifest`
        raises it, and may raise that.
        """
        at = fetch.begin

        def came(end: int, version: int) -> None:
            nonlocal at
            arrived(at, end, version)
            at = end

        while at < fetch.end:
            try:
                self._receive(peer(), msgspec.structs.replace(fetch, begin=at), payload, came)
            except (OSError, WireError, Absent) as error:
                failed(error)

    def _receive(self, peer: Peer, fetch: Fetch, payload: memoryview, arrived: Callable[[int, int], None]) -> None:
        at = fetch.begin
        with call(peer, self._rank, self._secret) as stream:
            send_fetch(stream, fetch)
            lease: tuple[int, int] | None = None
            for kind, length in frames(stream):
                if kind == LEASED:
                    lease = LEASE.unpack(read(stream, LEASE.size))
                    continue
                if kind == MANIFEST or at + length > fetch.end:
                    raise WireError("more came than was asked for")
                begin, end = at, at + length
                while at < end:
                    last = int(min(at + min(READ_BYTES, self._pace.most), end))
                    self._pace.wait(last - at)
                    read_into(stream, payload[at:last])
                    at = last
                    if lease is None:
                        arrived(at, fetch.version)
                if lease is not None:
                    if crc32(payload[begin:end]) != lease[1]:
                        raise DamagedError("A block of the image has another checksum.")
                    arrived(end, lease[0])
                if at == fetch.end:
                    return


def read(stream: socket.socket, count: int) -> bytes:
    """Exactly ``count`` bytes; raises `ConnectionError` when the stream ends, `BlockingIOError` after `SILENT_S`."""
    data = bytearray(count)
    read_into(stream, memoryview(data))
    return bytes(data)


def read_into(stream: socket.socket, view: memoryview) -> None:
    while view:
        count = stream.recv_into(view)
        if not count:
            raise ConnectionError("the connection was closed")
        view = view[count:]


def limit_pauses(stream: socket.socket, receive_s: float, send_s: float) -> None:
    """Longest pauses of blocking calls; the kernel keeps the time, so `os.sendfile` has them too."""
    for option, seconds in ((socket.SO_RCVTIMEO, receive_s), (socket.SO_SNDTIMEO, send_s)):
        stream.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(seconds), int(seconds % 1 * 1e6)))
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def call(peer: Peer, own_rank: int, secret: bytes) -> socket.socket:
    """A proven connection to a carrier; raises `OSError`, `NoProof` for one without the secret."""
    failure: Exception = ConnectionError(f"rank {peer.rank} has no address")
    for address in peer.addresses:
        try:
            stream = socket.create_connection((address, peer.port), timeout=CONNECT_S)
        except OSError as error:
            failure = error
            continue
        try:
            stream.settimeout(None)
            limit_pauses(stream, SILENT_S, SILENT_S)
            shake(calling(b"weights", secret, own_rank, peer.rank), stream)
        except BaseException:
            stream.close()
            raise
        return stream
    raise failure


def shake(handshake: Handshake[T], stream: socket.socket) -> T:
    got = None
    try:
        while True:
            step = handshake.send(got)
            got = read(stream, step) if isinstance(step, int) else None
            if isinstance(step, bytes):
                stream.sendall(step)
    except StopIteration as done:
        return cast(T, done.value)


def send_fetch(stream: socket.socket, fetch: Fetch) -> None:
    body = msgspec.msgpack.encode(fetch)
    stream.sendall(LENGTH.pack(len(body)) + body)


def read_fetch(stream: socket.socket) -> Fetch:
    """The caller's next request; raises `WireError` for anything else."""
    (length,) = LENGTH.unpack(read(stream, LENGTH.size))
    if length > MOST_FETCH:
        raise WireError(f"a request of {length} bytes")
    try:
        return _fetch.decode(read(stream, length))
    except msgspec.DecodeError as error:
        raise WireError(f"a request that cannot be read ({error})") from error


def frames(stream: socket.socket) -> Iterator[tuple[int, int]]:
    """(kind, bytes that follow) of each frame but signs of life; the caller reads those bytes before the next one.

    Raises `Absent` with the server's reason, and `TimeoutError` when signs of life alone came for `IDLE_S`.
    """
    came = time.monotonic()
    while True:
        kind, length = HEADER.unpack(read(stream, HEADER.size))
        if kind == ABSENT:
            raise Absent(read(stream, min(length, MOST_FETCH)).decode(errors="replace"))
        if kind == WAITING:
            if time.monotonic() - came > IDLE_S:
                raise TimeoutError(f"nothing came for {IDLE_S:.0f} s")
            continue
        if kind not in (MANIFEST, DATA, LEASED) or length > (MOST_MANIFEST if kind == MANIFEST else FRAME_BYTES):
            raise WireError(f"a frame of kind {kind} and {length} bytes")
        yield kind, length
        came = time.monotonic()
