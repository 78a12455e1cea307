"""Frames: how messages and arrays become bytes on a socket.

A frame is a 4-byte little-endian length and one msgpack value, decoded against a closed union of structs. Bytes of a
peer can become one of the listed messages, never code.

Arrays travel as little-endian bytes inside a message: int32 token ids, float32 log-probabilities, uint8 masks. A
context of 32k tokens then encodes in microseconds, not milliseconds.
"""

from __future__ import annotations

import select
import socket
import struct
import sys
import threading
from array import array
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import msgspec

LENGTH = struct.Struct("<I")
MAX_FRAME = (1 << 32) - 1

T = TypeVar("T")
A = TypeVar("A", int, float)


class FrameError(ValueError):
    """A frame that does not decode against its union, or is larger than a frame may be."""


def pack_i32(values: Sequence[int]) -> bytes:
    return _little_endian(array("i", values)).tobytes()


def unpack_i32(data: bytes) -> list[int]:
    items = array("i")
    items.frombytes(data)
    return _little_endian(items).tolist()


def pack_f32(values: Sequence[float]) -> bytes:
    return _little_endian(array("f", values)).tobytes()


def _little_endian(items: array[A]) -> array[A]:
    if sys.byteorder == "big":
        items.byteswap()
    return items


class Codec(Generic[T]):
    """Encoder and decoder of one closed union of message structs."""

    def __init__(self, union: Any) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(union)

    def encode(self, message: T) -> bytes:
        return self._encoder.encode(message)

    def frame(self, message: T) -> bytes:
        body = self._encoder.encode(message)
        if len(body) > MAX_FRAME:
            raise FrameError(f"a message of {len(body)} bytes exceeds the frame limit of {MAX_FRAME}")
        return LENGTH.pack(len(body)) + body

    def decode(self, data: bytes | bytearray | memoryview) -> T:
        """Decode one message; raises `FrameError` when it is not one of the union's messages."""
        try:
            message: T = self._decoder.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise FrameError(str(error)) from error
        return message


class FrameBuffer:
    """Incremental splitter of a byte stream into frame bodies of at most ``most`` bytes."""

    def __init__(self, most: int = MAX_FRAME) -> None:
        self._data, self._most = bytearray(), most

    def feed(self, chunk: bytes) -> list[bytes]:
        self._data += chunk
        out: list[bytes] = []
        start = 0
        while len(self._data) - start >= LENGTH.size:
            (size,) = LENGTH.unpack_from(self._data, start)
            if size > self._most:
                raise FrameError(f"a frame of {size} bytes is announced")
            end = start + LENGTH.size + size
            if len(self._data) < end:
                break
            out.append(bytes(self._data[start + LENGTH.size : end]))
            start = end
        if start:
            del self._data[:start]
        return out


class EngineSocket(Generic[T]):
    """A child's end of the sockets between it and its agent; any thread may send, one receives.

    It stays blocking: a receiver must not change the mode under a sender.
    """

    def __init__(self, descriptor: int, inbound: Codec[Any], outbound: Codec[T]) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._inbound, self._outbound = inbound, outbound
        self._buffer = FrameBuffer()
        self._pending: list[bytes] = []
        self._sending = threading.Lock()
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: T) -> None:
        """Send one message; raises `ConnectionError` when the agent is gone."""
        self.send_many([message])

    def send_many(self, messages: Sequence[T]) -> None:
        if messages:
            with self._sending:
                self._socket.sendall(b"".join(self._outbound.frame(m) for m in messages))

    def receive(self, timeout: float | None = None) -> Any:
        """Return the next message, or None after ``timeout`` seconds (None: no limit).

        Raises `EOFError` when the agent closed the socket: the engine then exits, so that no orphan survives its
        agent.
        """
        while not self._pending:
            if timeout is not None and not self._poll.poll(1000.0 * timeout):
                return None
            chunk = self._socket.recv(1 << 20)
            if not chunk:
                raise EOFError("the agent closed the engine socket")
            self._pending.extend(self._buffer.feed(chunk))
        return self._inbound.decode(self._pending.pop(0))
