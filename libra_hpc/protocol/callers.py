"""Callers of a port that have not proven yet that they have its secret.

- One more calls than there is room for -> the one that waits longest is disconnected: silent ones keep nobody out.
- A caller proves itself -> it no longer counts.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

MOST_UNPROVEN = 256
"""Connections.  Half: a stranger needs half as many to disconnect others; double: it has twice the threads of a carrier
server."""
PROVE_S = 5.0
"""For a caller to prove itself.  Shorter costs another round over the addresses, longer delays a start at a wrong
one."""


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
