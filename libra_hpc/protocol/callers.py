"""Callers of a port, who prove that they have its secret.

- One more calls than there is room for -> the one that waits longest is disconnected: silent ones keep nobody out.
- A caller proves itself -> it no longer counts.
- Both ends prove the secret, each over a nonce of the other, with its place: no proof can be used again, or elsewhere.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Generator, Iterator
from typing import Any, TypeVar

MOST_UNPROVEN = 256
"""Connections.  Half: a stranger needs half as many to disconnect others; double: it has twice the threads of a carrier
server."""
PROVE_S = 5.0
"""For a caller to prove itself.  Shorter costs another round over the addresses, longer delays a start at a wrong
one."""
NONCE_BYTES, PROOF_BYTES = 16, hashlib.sha256().digest_size
RANK, LENGTH = struct.Struct("<I"), struct.Struct("<Q")

T = TypeVar("T")
Handshake = Generator[int | bytes, Any, T]
"""Yields how many bytes it wants, which are sent into it, or the bytes that it says; returns what it found."""


def proof(secret: bytes, purpose: bytes, *parts: bytes) -> bytes:
    """HMAC-SHA256 over a purpose and parts, each after its length, so that no other parts have the same bytes."""
    return hmac.digest(secret, b"".join(LENGTH.pack(len(part)) + part for part in (purpose, *parts)), "sha256")


def proves(given: bytes, secret: bytes, purpose: bytes, *parts: bytes) -> bool:
    return hmac.compare_digest(given, proof(secret, purpose, *parts))


class NoProof(ConnectionError):
    """The other end does not have the secret."""


def calling(service: bytes, secret: bytes, caller: int, called: int) -> Handshake[bytes]:
    """The side of rank ``caller``; returns the key of the stream, raises `NoProof`."""
    ends = service, RANK.pack(caller), RANK.pack(called)
    theirs, own = (yield NONCE_BYTES), secrets.token_bytes(NONCE_BYTES)
    yield ends[1] + own + proof(secret, b"caller", theirs, *ends)
    if not proves((yield PROOF_BYTES), secret, b"called", own, *ends):
        raise NoProof(f"rank {called} does not have this run's secret")
    return proof(secret, b"stream", theirs, own, *ends)


def called_by(service: bytes, secret_with: Callable[[int], bytes | None], called: int) -> Handshake[tuple[int, bytes]]:
    """The side of rank ``called``; returns the caller and the key of the stream, raises `NoProof`.

    ``secret_with`` gives the secret with a rank; None where no such rank may call.
    """
    own = secrets.token_bytes(NONCE_BYTES)
    yield own
    (caller,) = RANK.unpack((yield RANK.size))
    theirs, given = (yield NONCE_BYTES), (yield PROOF_BYTES)
    secret, ends = secret_with(caller), (service, RANK.pack(caller), RANK.pack(called))
    if secret is None or not proves(given, secret, b"caller", own, *ends):
        raise NoProof("a caller without this run's secret was turned away")
    yield proof(secret, b"called", theirs, *ends)
    return caller, proof(secret, b"stream", own, theirs, *ends)


class Unproven:
    """The unproven callers of one port."""

    def __init__(self, most: int = MOST_UNPROVEN) -> None:
        self._most, self._lock = most, threading.Lock()
        self._streams: dict[socket.socket, None] = {}
        """In the order in which they called."""

    @contextlib.contextmanager
    def proving(self, stream: socket.socket) -> Iterator[None]:
        """Within the block its caller proves itself, and may be disconnected."""
        with self._lock:
            if len(self._streams) >= self._most:
                oldest = next(iter(self._streams))
                del self._streams[oldest]
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)
            self._streams[stream] = None
        try:
            yield
        finally:
            with self._lock:
                self._streams.pop(stream, None)
