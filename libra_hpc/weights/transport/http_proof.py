"""How both ends of an HTTP connection prove that they have a secret, and resources in ranges.

A connection begins with the server's nonce: its 401 has it in ``WWW-Authenticate``. Every request then has a nonce of
its own and an HMAC over both nonces, target and range; every answer one over the request's and all its headers. So
nothing can be read, repeated or forged without the secret. Nothing is encrypted.

Every resource has ranges (``Range: bytes=A-B``); an answer has at most `PART_BYTES`, and names which and of how many.
"""

from __future__ import annotations

import hashlib
import hmac

SCHEME = "Libra"
VERSION, PROOF = "Resource-Version", "Proof"
PART_BYTES = 4 << 20
"""Most of an answer, which is in memory at both ends. Half: twice as many round trips; what breaks comes again."""


class NotServed(Exception):
    """404: the resource is not there, or not any more."""


class Refused(Exception):
    """400, 401: there is no such resource, or the server has another secret."""


def request_proof(secret: bytes, nonces: tuple[str, str], target: str, span: str) -> str:
    """``nonces``: the server's and the request's; ``span``: the header ``Range``."""
    return _proof(secret, "request", *nonces, target, span)


def answer_proof(secret: bytes, request: str, answer: tuple[int, str, str], body: bytes) -> str:
    """``request``: its proof; ``answer``: status, version and ``Content-Range``."""
    # The interpreter's lock is free while a large body is hashed, unlike in an HMAC of it.
    return _proof(secret, "answer", request, *map(str, answer), hashlib.sha256(body).hexdigest())


def _proof(secret: bytes, *words: str) -> str:
    return hmac.digest(secret, "\n".join(words).encode(), "sha256").hex()
