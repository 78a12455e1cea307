"""Reads resources of a server with the same secret (`libra_hpc.weights.transport.http_proof`), from any thread.

- A connection broke, or an answer is not proven -> the same bytes again, over another one; what was proven stays.
"""

from __future__ import annotations

import hmac
import http.client
import secrets
import threading
import time
from typing import NamedTuple

from libra_hpc.errors import error_text
from libra_hpc.weights.transport.http_proof import (
    PART_BYTES,
    PROOF,
    SCHEME,
    VERSION,
    NotServed,
    Refused,
    answer_proof,
    request_proof,
)

SILENT_S = 30.0
"""Longest pause within an answer; the budget of a server may be small, and shared."""
TRIES, RETRY_S = 5, 0.5
"""For the same bytes, and the first pause between two; it doubles."""


class HttpSource(NamedTuple):
    host: str
    port: int
    secret: bytes


class Received(NamedTuple):
    version: int
    """The oldest, where they came in several answers."""
    data: bytes


class _Unproven(Exception):
    """An answer is not what a server with the secret sent."""


class HttpCaller:
    def __init__(self, source: HttpSource) -> None:
        self._source = source
        self._local = threading.local()

    def read(self, target: str, begin: int = 0, end: int | None = None) -> Received:
        """Bytes [begin, end) of a resource (None: all).

        Raises `NotServed`, `Refused`, and `ConnectionError` after `TRIES`.
        """
        data, versions, stop = bytearray(), [], end
        while stop is None or begin + len(data) < stop:
            version, total, more = self._ask(target, begin + len(data), stop)
            if not more:
                raise Refused(f"{target} ends at byte {begin + len(data):,} of {total:,}")
            data += more
            versions.append(version)
            stop = total if stop is None else stop
        return Received(min(versions), bytes(data))

    def _ask(self, target: str, begin: int, end: int | None) -> tuple[int, int, bytes]:
        """Version, size of the resource, and its bytes from ``begin`` on, as many as the server sends at once."""
        pause_s = RETRY_S
        for number in range(TRIES):
            try:
                connection: _Connection = getattr(self._local, "connection", None) or _Connection(self._source)
                self._local.connection = connection
                return connection.get(target, begin, end)
            except (OSError, http.client.HTTPException, _Unproven) as error:
                self._local.connection = None
                connection.close()
                if number == TRIES - 1:
                    raise ConnectionError(f"{self._source.host}: {error_text(error)}") from error
                time.sleep(pause_s)
                pause_s *= 2
        raise AssertionError


class _Connection:
    """One connection to the server."""

    def __init__(self, source: HttpSource) -> None:
        self._http = http.client.HTTPConnection(source.host, source.port, timeout=SILENT_S)
        self._secret, self._nonce = source.secret, ""

    def close(self) -> None:
        self._http.close()

    def get(self, target: str, begin: int, end: int | None) -> tuple[int, int, bytes]:
        span = f"bytes={begin}-{'' if end is None else end - 1}"
        for _ in range(2):
            own = secrets.token_hex(16)
            request = request_proof(self._secret, (self._nonce, own), target, span)
            headers = {"Range": span, "Authorization": f"{SCHEME} {own} {request}"}
            self._http.request("GET", target, headers=headers)
            answer = self._http.getresponse()
            if answer.length is None or answer.length > PART_BYTES:
                raise _Unproven("an answer of another length")
            data = answer.read()
            if answer.status != 401:
                return self._proven(request, answer, data)
            # The first request of a connection: it has the server's nonce from now on.
            self._nonce = answer.getheader("WWW-Authenticate", "").removeprefix(f"{SCHEME} ")
        raise Refused(f"{self._http.host} has another secret")

    def _proven(self, request: str, answer: http.client.HTTPResponse, data: bytes) -> tuple[int, int, bytes]:
        version, span = answer.getheader(VERSION, ""), answer.getheader("Content-Range", "")
        expected = answer_proof(self._secret, request, (answer.status, version, span), data)
        if not hmac.compare_digest(expected.encode(), answer.getheader(PROOF, "").encode()):
            raise _Unproven("an answer without proof")
        if answer.status == 404:
            raise NotServed(data.decode())
        if answer.status != 206:
            raise Refused(data.decode())
        return int(version), int(span.rpartition("/")[2]), data
