"""A small client of weights over HTTP (`libra_hpc.weights.served_weights`): the least that another cluster does.

- The deltas from its version on are served -> it takes them; else blocks of the image, which may go on meanwhile, and
  then the deltas from the oldest block on. Values overwrite, so all blocks end at one version.
- A connection breaks, an answer is not proven, a piece is damaged -> the call fails. It can be made again.
"""

from __future__ import annotations

import hmac
import http.client
import secrets
from collections.abc import Sequence
from urllib.parse import urlencode

import msgspec
import numpy as np

from libra_hpc.weights.delta import piece_values
from libra_hpc.weights.pieces import VALUES, WHOLE, TensorBlock, decode_offer
from libra_hpc.weights.served_weights import ServedVersion
from libra_hpc.weights.transport.http_proof import (
    PROOF,
    SCHEME,
    VERSION,
    NotServed,
    Refused,
    answer_proof,
    request_proof,
)

Weights = dict[str, np.ndarray]
"""Flat tensors by name."""


class HttpCaller:
    """One connection."""

    def __init__(self, port: int, secret: bytes) -> None:
        self._http = http.client.HTTPConnection("127.0.0.1", port, timeout=30.0)
        self._secret, self._nonce = secret, ""

    def read(self, target: str) -> tuple[int, bytes]:
        """Version and bytes of a resource; the oldest version, where they come in several answers."""
        version, data, total = self._ask(target, "bytes=0-")
        while len(data) < total:
            next_version, more, total = self._ask(target, f"bytes={len(data)}-")
            version = min(version, next_version)
            data += more
        return version, data

    def _ask(self, target: str, span: str) -> tuple[int, bytes, int]:
        """Version, bytes, and the size of the resource."""
        own = secrets.token_hex(16)
        request = request_proof(self._secret, (self._nonce, own), target, span)
        self._http.request("GET", target, headers={"Range": span, "Authorization": f"{SCHEME} {own} {request}"})
        answer = self._http.getresponse()
        data = answer.read()
        if answer.status == 401:
            if self._nonce:
                raise Refused("the server has another secret")
            self._nonce = answer.headers["WWW-Authenticate"].removeprefix(f"{SCHEME} ")
            return self._ask(target, span)
        version, sent = answer.getheader(VERSION, ""), answer.getheader("Content-Range", "")
        expected = answer_proof(self._secret, request, (answer.status, version, sent), data)
        if not hmac.compare_digest(expected, answer.getheader(PROOF, "")):
            raise Refused("an answer without proof")
        if answer.status != 206:
            raise (NotServed if answer.status == 404 else Refused)(data.decode())
        return int(version), data, int(sent.rpartition("/")[2])


def image_target(block: TensorBlock) -> str:
    return "/image?" + urlencode(block._asdict())


def view(weights: Weights, block: TensorBlock) -> np.ndarray:
    flat = weights[block.tensor][block.offset :]
    return np.lib.stride_tricks.as_strided(
        flat, (block.rows, block.cols), (block.stride * flat.itemsize, flat.itemsize)
    )


def pull(caller: HttpCaller, weights: Weights, blocks: Sequence[TensorBlock], have: int = WHOLE) -> int:
    """Bring ``blocks`` from version ``have`` to the newest, which is returned."""
    served = msgspec.json.decode(caller.read("/weights")[1], type=ServedVersion)
    if have < served.oldest:
        versions = []
        for block in blocks:
            version, data = caller.read(image_target(block))
            view(weights, block)[:] = np.frombuffer(data, VALUES[served.dtype]).reshape(block.rows, block.cols)
            versions.append(version)
        return pull(caller, weights, blocks, min(versions))
    for delta in served.deltas:
        for writer in delta.writers if delta.version > have else ():
            offer = f"/offers/{delta.version}/{writer}"
            payload = caller.read(f"{offer}/payload")[1]
            for piece in decode_offer(caller.read(f"{offer}/manifest")[1], writer).pieces:
                index, values = piece_values(piece, payload)
                index = np.arange(len(values)) if index is None else index
                view(weights, piece.block)[index // piece.block.cols, index % piece.block.cols] = values
    return served.version
