"""The owner's end of its ranks' connections (`libra_hpc.process.owner_link`): who has joined, met and ended.

- A caller proves in `CALL_S` that it has the secret of this start, or is disconnected; so is the oldest of too many.
- A connection ends -> its rank is in `RankLinks.gone`.
- `RankLinks.announce` -> all that live get the end of a rank; one that joins later gets those before.
"""

from __future__ import annotations

import secrets
import selectors
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

from libra_hpc.process.addresses import listen
from libra_hpc.process.owner_link import CALL_S, RankStream, keep_alive
from libra_hpc.protocol.callers import MOST_UNPROVEN, NONCE_BYTES, proof
from libra_hpc.protocol.codec import FrameError
from libra_hpc.protocol.ranks_stop import ProcessLost, RankJoined, RanksMet


class RankLinks:
    def __init__(self) -> None:
        self._selector, self._secret = selectors.DefaultSelector(), secrets.token_bytes(32)
        self._callers: dict[RankStream, float] = {}
        """Callers that have not proven themselves, and since when."""
        self._streams: dict[int, RankStream] = {}
        self.met, self._most_callers = False, MOST_UNPROVEN
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
        self._join(rank, stream)
        self.serve(ours, lambda: self._read(stream))
        return theirs, f"{theirs.fileno()} {key.hex()} 0"

    def open(self, addresses: Sequence[str], size: int) -> str:
        """Take callers from now on; returns the value of `OWNER` for them."""
        self._most_callers += size
        listener = listen(addresses, 2 * size)
        listener.setblocking(False)
        self.serve(listener, lambda: self._accept(listener))
        return " ".join([self._secret.hex(), str(listener.getsockname()[1]), *addresses])

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
                stream.send(ProcessLost(rank, reason))

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
        if len(self._callers) >= self._most_callers:
            self._drop(next(iter(self._callers)))
        self._callers[caller] = time.monotonic()
        self.serve(stream, lambda: self._read(caller))

    def _drop(self, caller: RankStream) -> None:
        self._callers.pop(caller, None)
        self.leave(caller.stream)
        caller.stream.close()

    def _join(self, rank: int, stream: RankStream) -> None:
        self._streams[rank] = stream
        for other, reason in self.lost.items():
            stream.send(ProcessLost(other, reason))

    def _read(self, stream: RankStream) -> None:
        try:
            for message in stream.received():
                if stream not in self._callers:
                    self.met = self.met or isinstance(message, RanksMet)
                elif isinstance(message, RankJoined):
                    del self._callers[stream]
                    self.nodes[message.rank] = message.node
                    self._join(message.rank, stream)
        except BlockingIOError:
            return
        except (OSError, EOFError, FrameError) as error:
            for rank in [rank for rank, one in self._streams.items() if one is stream]:
                del self._streams[rank]
                if isinstance(error, EOFError):
                    self.gone[rank] = time.monotonic()
            self._drop(stream)
