"""The owner's end of its ranks' connections (`libra_hpc.process.owner_link`): who has joined, met and ended.

- A caller proves in `CALL_S` that it has the secret of this start, or is disconnected; so is the oldest of too many.
- All ranks have sent their record of a round -> each gets those of all (`OwnerLink.gather`).
- A rank takes nothing -> what it is to get waits here, and nobody else does.
- A connection ends -> its rank is in `RankLinks.gone`.
- `RankLinks.announce` -> all that live get the end of a rank; one that joins later gets those before.
"""

from __future__ import annotations

import secrets
import selectors
import socket
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any

from libra_hpc.process.addresses import listen
from libra_hpc.process.owner_link import CALL_S, RankStream, keep_alive, link_value
from libra_hpc.protocol.callers import MOST_UNPROVEN, NONCE_BYTES, proof
from libra_hpc.protocol.codec import FrameError
from libra_hpc.protocol.ranks_stop import (
    LinkMessage,
    ProcessLost,
    RankJoined,
    RankRecord,
    RankRecords,
    RanksMet,
    rank_records,
)


class RankLinks:
    def __init__(self, size: int) -> None:
        self._size, self._records = size, dict[int, bytes]()
        """All ranks, and the records of the present round."""
        self._selector, self._secret = selectors.DefaultSelector(), secrets.token_bytes(32)
        self._callers: dict[RankStream, float] = {}
        """Callers that have not proven themselves, and since when."""
        self._streams: dict[int, RankStream] = {}
        self.met = False
        self.nodes: dict[int, str] = {}
        """Slurm's names of their nodes."""
        self.gone: dict[int, float] = {}
        """Ranks whose connection has ended, and since when; times are monotonic seconds."""
        self.lost: dict[int, str] = {}
        """Ranks whose end was announced, and the reason."""

    @property
    def ended(self) -> set[int]:
        """Ranks whose process has ended."""
        return {*self.gone, *self.lost}

    def born(self, rank: int) -> tuple[socket.socket, str]:
        """The connection of a rank that this process starts, and the value of `LINK` for it."""
        ours, theirs = socket.socketpair()
        key = secrets.token_bytes(32)
        stream = RankStream(ours, key, b"owner")
        self.serve(ours, lambda: self._read(stream))
        self._join(rank, stream)
        return theirs, link_value(theirs, key, 0, (rank, self._size), self._secret)

    def open(self, addresses: Sequence[str]) -> str:
        """Take callers from now on; returns the value of `OWNER` for them."""
        listener = listen(addresses, 2 * self._size)
        listener.setblocking(False)
        self.serve(listener, lambda: self._accept(listener))
        return " ".join([self._secret.hex(), str(self._size), str(listener.getsockname()[1]), *addresses])

    def serve(self, source: Any, readable: Callable[[], object]) -> None:
        """Have `wait` call something once a file or socket can be read."""
        self._selector.register(source, selectors.EVENT_READ, readable)

    def leave(self, source: Any) -> None:
        self._selector.unregister(source)

    def wait(self, seconds: float) -> None:
        """Serve once, for at most so long."""
        for key, _ in self._selector.select(seconds):
            key.data()
        for caller in [one for one, since in self._callers.items() if time.monotonic() - since > CALL_S]:
            self._drop(caller)

    def announce(self, rank: int, reason: str = "") -> None:
        """Have all others know that the process of a rank has ended."""
        if rank not in self.lost:
            self.lost[rank] = reason
            for stream in self._streams.values():
                self._send(stream, ProcessLost(rank, reason))

    def close(self) -> None:
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self._selector.close()

    def _accept(self, listener: socket.socket) -> None:
        try:
            stream, _ = listener.accept()
            keep_alive(stream)
            nonce = secrets.token_bytes(NONCE_BYTES)
            stream.send(nonce)
        except OSError:
            return  # it is gone, or there are too many open files
        caller = RankStream(stream, proof(self._secret, b"link", nonce), b"owner")
        if len(self._callers) >= MOST_UNPROVEN + self._size:
            self._drop(next(iter(self._callers)))
        self._callers[caller] = time.monotonic()
        self.serve(stream, lambda: self._read(caller))

    def _drop(self, caller: RankStream) -> None:
        self._callers.pop(caller, None)
        self.leave(caller.stream)
        caller.stream.close()

    def _join(self, rank: int, stream: RankStream) -> None:
        self._streams[rank], stream.rank = stream, rank
        for other, reason in self.lost.items():
            self._send(stream, ProcessLost(other, reason))

    def _send(self, stream: RankStream, message: LinkMessage) -> None:
        stream.send(message)
        self._go_on(stream)

    def _go_on(self, stream: RankStream) -> None:
        """Have `wait` send what still waits."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if stream.waiting else 0)
        self._selector.modify(stream.stream, events, lambda: self._read(stream))

    def _on_record(self, rank: int, record: bytes) -> None:
        self._records[rank] = record
        if len(self._records) == self._size:
            records = [self._records.pop(rank) for rank in range(self._size)]
            message = RankRecords(zlib.compress(rank_records.encode(records)))
            for stream in self._streams.values():
                self._send(stream, message)

    def _read(self, stream: RankStream) -> None:
        stream.flush()
        try:
            for message in stream.received():
                if isinstance(message, RankRecord) and stream not in self._callers:
                    self._on_record(stream.rank, message.record)
                elif stream not in self._callers:
                    self.met = self.met or isinstance(message, RanksMet)
                elif isinstance(message, RankJoined) and 0 <= message.rank < self._size:
                    del self._callers[stream]
                    self.nodes[message.rank] = message.node
                    self._join(message.rank, stream)
        except BlockingIOError:
            pass
        except (OSError, EOFError, FrameError) as error:
            if stream.rank >= 0:
                self._streams.pop(stream.rank, None)
                if isinstance(error, EOFError):
                    self.gone[stream.rank] = time.monotonic()
            self._drop(stream)
            return
        self._go_on(stream)
