"""The connection of a rank and the run's owner (`libra_hpc.owner.rank_links`): its end is that of the process.

- A rank on the owner's machine is started with it; a task of Slurm calls the owner before it becomes the agent.
- The ranks meet over it: each sends a record, and gets those of all.
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
import select
import socket
import struct
import time
import zlib
from typing import Any

from libra_hpc.errors import OperationError
from libra_hpc.protocol.callers import NONCE_BYTES, PROOF_BYTES, proof, proves
from libra_hpc.protocol.codec import LENGTH, FrameBuffer, FrameError
from libra_hpc.protocol.ranks_stop import (
    LinkMessage,
    ProcessLost,
    RankJoined,
    RankRecord,
    RankRecords,
    RanksMet,
    owner_link,
    rank_records,
)

OWNER = "LIBRA_HPC_OWNER"
"""Environment variable of Slurm's tasks: secret, number of ranks, port and addresses of the owner, with blanks between
them."""
LINK = "LIBRA_HPC_OWNER_LINK"
"""Environment variable of a rank, by `link_value`; else why there is no connection, as a sentence."""
CALL_S = 5.0
"""For one address to answer.  Half: a busy switch looks like a wrong address; double: a start fails later."""
NONCE_S = 30.0
"""For an owner that waits for a file system or a command of Slurm."""
KEEP_ALIVE = {socket.TCP_KEEPIDLE: 60, socket.TCP_KEEPINTVL: 30, socket.TCP_KEEPCNT: 10}
"""Seconds, seconds, times: a firewall sees traffic, and a machine that is gone is noticed after six minutes."""
MOST_BYTES = {b"owner": 16384, b"rank": 64 << 20}
"""Longest message that an end takes: from whoever calls a record, of which a node with 20 addresses uses 500 bytes; and
those of all ranks."""
MEET_S = 90
"""For a round of the meeting.  A start takes seconds; nodes that load Python from a cold shared file system come up to
a minute apart."""
_COUNT = struct.Struct("<Q")
LOST = "the connection to the owner of the run has ended"

log = logging.getLogger("libra_hpc.agent")


class NoWorld(OperationError):
    """The ranks cannot go on together; ``rank``: the own one, -1 where they have not met, 0 where it alone knows."""

    def __init__(self, problem: str, rank: int = -1) -> None:
        super().__init__(problem)
        self.rank = rank


class RankStream:
    """One end of the connection, which never blocks; ``end``: ``owner`` or ``rank``."""

    def __init__(self, stream: socket.socket, key: bytes, end: bytes, sent: int = 0) -> None:
        self.stream, self._key, self._end = stream, key, end
        self._buffer, self._sent, self._received = FrameBuffer(MOST_BYTES[end]), sent, 0
        self.rank = -1
        """The one at the other end, once it has proven itself."""
        self.waiting = bytearray()
        """What the kernel had no room for."""
        stream.setblocking(False)

    def send(self, message: LinkMessage) -> None:
        """Send a message, unless the connection has ended."""
        body = owner_link.encode(message)
        frame = body + proof(self._key, self._end, _COUNT.pack(self._sent), body)
        self._sent += 1
        self.waiting += LENGTH.pack(len(frame)) + frame
        self.flush()

    def flush(self) -> None:
        """Send what waits, as far as the kernel has room."""
        with contextlib.suppress(OSError):
            del self.waiting[: self.stream.send(self.waiting)]

    def received(self) -> list[LinkMessage]:
        """What has come.

        Raises `EOFError` where the other process has ended, `OSError` where the network did, and `FrameError` for what
        is no message.
        """
        try:
            data = self.stream.recv(1 << 20)
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


def link_value(stream: socket.socket, key: bytes, sent: int, place: tuple[int, int], secret: bytes) -> str:
    """Value of `LINK`: descriptor of the connection, its key, how many frames the rank has sent, ``place`` (rank and
    number of ranks), and the secret of the run, which follows from the owner's."""
    return " ".join(map(str, (stream.fileno(), key.hex(), sent, *place, proof(secret, b"run").hex())))


def call_owner(rank: int, node: str) -> int:
    """Connect this process, which becomes a rank, to the owner; returns the descriptor, -1 without one."""
    secret, size, port, *addresses = os.environ.pop(OWNER, "  ").split(" ")
    for address in addresses:
        with contextlib.suppress(OSError, EOFError):
            stream = socket.create_connection((address, int(port)), timeout=CALL_S)
            stream.settimeout(NONCE_S)
            key = proof(bytes.fromhex(secret), b"link", stream.recv(NONCE_BYTES, socket.MSG_WAITALL))
            keep_alive(stream)
            RankStream(stream, key, b"rank").send(RankJoined(rank, node))
            stream.set_inheritable(True)
            os.environ[LINK] = link_value(stream, key, 1, (rank, int(size)), bytes.fromhex(secret))
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
        self.rank, self.size, self.secret = -1, 0, b""
        """Rank of this process, number of ranks, and secret of the run; without an owner there are none."""
        self._records: list[bytes] | None = None
        """Records of all ranks, until `gather` takes them."""
        self._stream: RankStream | None = None
        if number.isdigit():
            key, sent, rank, size, secret = rest.split()
            self.rank, self.size, self.secret = int(rank), int(size), bytes.fromhex(secret)
            stream = socket.socket(fileno=int(number))
            stream.set_inheritable(False)
            self._stream = RankStream(stream, bytes.fromhex(key), b"rank", int(sent))

    def met(self) -> None:
        """Report that all ranks are in one world."""
        if self._stream is not None:
            self._stream.send(RanksMet())

    def gather(self, record: bytes) -> list[bytes]:
        """The records of all ranks, in rank order, once all have sent theirs; raises `NoWorld`."""
        if self._stream is None:
            # No other rank can leave why.
            raise NoWorld(self.problem or "this agent has no owner, which starts it and all others", 0)
        self._stream.send(RankRecord(record))
        deadline = time.monotonic() + MEET_S
        while self._records is None:
            if not select.select([self._stream.stream], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise NoWorld(f"the ranks did not meet within {MEET_S} s")
            try:
                self._take(self._stream)
            except (OSError, EOFError, FrameError) as error:
                raise NoWorld(f"{LOST}: {str(error) or 'its process ended'}") from error
        records, self._records = self._records, None
        return records

    def serve(self) -> None:
        """Read from now on, in this thread's loop."""
        if self._stream is not None:
            asyncio.get_running_loop().add_reader(self._stream.stream, self._on_readable, self._stream)

    def _on_readable(self, stream: RankStream) -> None:
        try:
            self._take(stream)
        except (OSError, EOFError, FrameError) as error:
            log.warning("%s: %s", LOST, str(error) or "its process ended")
            asyncio.get_running_loop().remove_reader(stream.stream)

    def _take(self, stream: RankStream) -> None:
        found: list[Any] = []
        with contextlib.suppress(BlockingIOError):
            found = stream.received()
        for message in found:
            if isinstance(message, ProcessLost):
                self.lost[message.rank] = message.reason
            elif isinstance(message, RankRecords):
                self._records = rank_records.decode(zlib.decompress(message.packed))
