"""The connection of a rank and the run's owner (`libra_hpc.owner.rank_links`): its end is that of the process.

- A rank on the owner's machine is started with it; a task of Slurm calls the owner before it becomes the agent.
- A process ends, however -> its kernel closes the connection, and the owner reports that to all others.
- A process is stopped, or the network is away -> the connection stays; silence alone proves nothing.
- The network gives it up after minutes -> nobody has ended; heartbeats decide (`libra_hpc.coordinator.liveness`).

On the wire: the owner's nonce to callers, then frames with a tag that proves the secret and the frame's place.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import struct
from typing import Any

from libra_hpc.protocol.callers import NONCE_BYTES, PROOF_BYTES, proof, proves
from libra_hpc.protocol.codec import LENGTH, FrameBuffer, FrameError
from libra_hpc.protocol.ranks_stop import LinkMessage, ProcessLost, RankJoined, RanksMet, owner_link

OWNER = "LIBRA_HPC_OWNER"
"""Environment variable of Slurm's tasks: secret, port and addresses of the owner, with blanks between them."""
LINK = "LIBRA_HPC_OWNER_LINK"
"""Environment variable of a rank: descriptor of its connection, its key, and how many frames it has sent; else why
there is no connection, as a sentence."""
CALL_S = 5.0
"""For one address to answer.  Half: a busy switch looks like a wrong address; double: a start fails later."""
NONCE_S = 30.0
"""For an owner that waits for a file system or a command of Slurm."""
KEEP_ALIVE = {socket.TCP_KEEPIDLE: 60, socket.TCP_KEEPINTVL: 30, socket.TCP_KEEPCNT: 10}
"""Seconds, seconds, times: a firewall sees traffic, and a machine that is gone is noticed after six minutes."""
MOST_BYTES = 4096
"""Longest message: one with the reason of a node that is down."""
_COUNT = struct.Struct("<Q")

log = logging.getLogger("libra_hpc.agent")


class RankStream:
    """One end of the connection, which never blocks; ``end``: ``owner`` or ``rank``."""

    def __init__(self, stream: socket.socket, key: bytes, end: bytes, sent: int = 0) -> None:
        self.stream, self._key, self._end = stream, key, end
        self._buffer, self._sent, self._received = FrameBuffer(MOST_BYTES), sent, 0
        stream.setblocking(False)

    def send(self, message: LinkMessage) -> None:
        """Send a message, unless the connection has ended; they are few, so the kernel has room for all."""
        body = owner_link.encode(message)
        frame = body + proof(self._key, self._end, _COUNT.pack(self._sent), body)
        self._sent += 1
        with contextlib.suppress(OSError):
            self.stream.send(LENGTH.pack(len(frame)) + frame)

    def received(self) -> list[LinkMessage]:
        """What has come.

        Raises `EOFError` where the other process has ended, `OSError` where the network did, and `FrameError` for what
        is no message.
        """
        try:
            data = self.stream.recv(MOST_BYTES)
        except ConnectionResetError:
            data = b""
        if not data:
            raise EOFError
        return [self._opened(frame) for frame in self._buffer.feed(data)]

    def _opened(self, frame: bytes) -> LinkMessage:
        body, other = frame[:-PROOF_BYTES], b"rank" if self._end == b"owner" else b"owner"
        if not proves(frame[-PROOF_BYTES:], self._key, other, _COUNT.pack(self._received), body):
            raise FrameError("a frame without the secret of this start")
        self._received += 1
        return owner_link.decode(body)


def keep_alive(stream: socket.socket) -> None:
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in KEEP_ALIVE.items():
        stream.setsockopt(socket.IPPROTO_TCP, option, value)


def call_owner(rank: int, node: str) -> int:
    """Connect this process, which becomes a rank, to the owner; returns the descriptor, -1 without one."""
    secret, port, *addresses = os.environ.pop(OWNER, " ").split(" ")
    for address in addresses:
        with contextlib.suppress(OSError, EOFError):
            stream = socket.create_connection((address, int(port)), timeout=CALL_S)
            stream.settimeout(NONCE_S)
            key = proof(bytes.fromhex(secret), b"link", stream.recv(NONCE_BYTES, socket.MSG_WAITALL))
            keep_alive(stream)
            RankStream(stream, key, b"rank").send(RankJoined(rank, node))
            stream.set_inheritable(True)
            os.environ[LINK] = f"{stream.fileno()} {key.hex()} 1"
            return stream.detach()
    if addresses:
        tried = f"{', '.join(addresses)} port {port}"
        os.environ[LINK] = f"{node or socket.gethostname()} cannot reach the owner of the run ({tried})"
    return -1


class OwnerLink:
    """The agent's end; without an owner it is silent."""

    def __init__(self) -> None:
        number, _, rest = os.environ.pop(LINK, "").partition(" ")
        self.problem = "" if number.isdigit() or not number else f"{number} {rest}"
        """Why there is no connection; empty where there is one, or no owner."""
        self.lost: dict[int, str] = {}
        """Ranks whose process has ended, with the reason why Slurm set the node down, or none."""
        self._stream: RankStream | None = None
        if number.isdigit():
            key, sent = rest.split()
            stream = socket.socket(fileno=int(number))
            stream.set_inheritable(False)
            self._stream = RankStream(stream, bytes.fromhex(key), b"rank", int(sent))

    def met(self) -> None:
        """Report that all ranks are in one world."""
        if self._stream is not None:
            self._stream.send(RanksMet())

    def serve(self) -> None:
        """Read from now on, in this thread's loop."""
        if self._stream is not None:
            asyncio.get_running_loop().add_reader(self._stream.stream, self._on_readable, self._stream)

    def _on_readable(self, stream: RankStream) -> None:
        try:
            found: list[Any] = stream.received()
        except BlockingIOError:
            return
        except (OSError, EOFError, FrameError) as error:
            log.warning("the connection to the owner of the run has ended: %s", str(error) or "its process ended")
            asyncio.get_running_loop().remove_reader(stream.stream)
            return
        for message in found:
            if isinstance(message, ProcessLost):
                self.lost[message.rank] = message.reason
