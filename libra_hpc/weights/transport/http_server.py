"""Serves resources over HTTP to callers with a secret (`libra_hpc.weights.transport.http_proof`).

- A caller without the secret -> 401, whatever it asks for; silent ones keep nobody out (`Unproven`).
- A resource is not there -> 404 with the reason; a request that makes no sense -> 400.
- All callers together are sent no more than the budget of bandwidth.
"""

from __future__ import annotations

import contextlib
import hmac
import io
import logging
import re
import secrets
import socket
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

from libra_hpc.protocol.callers import PROVE_S, Unproven

from .http_proof import PART_BYTES, PROOF, SCHEME, VERSION, NotServed, Refused, answer_proof, request_proof
from .token_bucket import BandwidthPace

SLICE_BYTES = 64 << 10
"""Sent at once, between two looks at the budget."""
UNREAD_S = 30.0
"""For a caller that has proven itself to send a request or to take any byte."""
MOST_CALLERS = 64
"""Connections of such callers at once, each with a thread; as many of others."""
LINE_BYTES = 4096
"""A request has no longer line, and up to a hundred, which are in memory."""
RANGE = re.compile(r"bytes=(\d{1,18})-(\d{0,18})")

log = logging.getLogger("libra_hpc.http")


class Part(NamedTuple):
    """Bytes of a resource of ``total`` bytes, from where they were asked for, at a version."""

    version: int
    total: int
    data: bytes


Resources = Callable[[str, int, int], Part]
"""Return bytes [begin, end), or fewer, of a target; raises `NotServed` and `Refused`."""


class HttpServer(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, listener: socket.socket, secret: bytes, resources: Resources, bytes_per_s: float) -> None:
        super().__init__(listener.getsockname()[:2], _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self.secret, self.read = secret, resources
        self.callers, self.unproven = threading.BoundedSemaphore(MOST_CALLERS), Unproven(MOST_CALLERS)
        self.pace = BandwidthPace(bytes_per_s)

    def start(self) -> None:
        threading.Thread(target=self.serve_forever, name="http", daemon=True).start()

    def handle_error(self, request: Any, client_address: Any) -> None:
        # One that left, or does not read, is none of ours.
        if not isinstance(sys.exc_info()[1], OSError):
            log.exception("a request of %s failed", client_address)


class _Lines(io.BufferedReader):
    def readline(self, size: int | None = -1, /) -> bytes:
        return super().readline(LINE_BYTES)


class _Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    timeout = PROVE_S
    disable_nagle_algorithm = True
    server: HttpServer
    server_version, sys_version = "libra-hpc", ""

    def handle(self) -> None:
        self.rfile = _Lines(self.connection.makefile("rb", buffering=0))
        self._nonce, self._proven = secrets.token_hex(16), False
        with contextlib.ExitStack() as self._stay:
            self._stay.enter_context(self.server.unproven.proving(self.connection))
            super().handle()

    def do_GET(self) -> None:
        span = self.headers.get("Range", "")
        scheme, _, words = self.headers.get("Authorization", "").partition(" ")
        nonce, _, given = words.partition(" ")
        expected = request_proof(self.server.secret, (self._nonce, nonce), self.path, span)
        if scheme != SCHEME or not hmac.compare_digest(expected.encode(), given.encode()):
            self.send_response(401)
            self.send_header("WWW-Authenticate", f"{SCHEME} {self._nonce}")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        if not self._proven and not self._admitted():
            self.close_connection = True
            return
        asked = RANGE.fullmatch(span)
        begin, end = (int(asked[1]), int(asked[2] or PART_BYTES + int(asked[1])) + 1) if asked else (0, PART_BYTES)
        try:
            part = self.server.read(self.path, begin, min(end, begin + PART_BYTES))
            self._answer(206, expected, part, f"bytes {begin}-{begin + len(part.data) - 1}/{part.total}")
        except NotServed as error:
            self._answer(404, expected, Part(-1, 0, str(error).encode()))
        except Refused as error:
            self._answer(400, expected, Part(-1, 0, str(error).encode()))

    def _admitted(self) -> bool:
        """Whether there is room for one more caller that has proven itself."""
        self._stay.close()
        self._proven = self.server.callers.acquire(blocking=False)
        if self._proven:
            self._stay.callback(self.server.callers.release)
            self.connection.settimeout(UNREAD_S)
        return self._proven

    def _answer(self, status: int, request: str, part: Part, span: str = "") -> None:
        proof = answer_proof(self.server.secret, request, (status, str(part.version), span), part.data)
        headers = {"Content-Length": len(part.data), VERSION: part.version, "Content-Range": span, PROOF: proof}
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, str(value))
        self.end_headers()
        with memoryview(part.data) as view:
            for at in range(0, len(view), SLICE_BYTES):
                self.server.pace.wait(min(SLICE_BYTES, len(view) - at))
                self.wfile.write(view[at : at + SLICE_BYTES])

    def log_message(self, format: str, *values: Any) -> None:
        log.debug(format, *values)
