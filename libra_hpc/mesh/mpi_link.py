"""The agent's end of its MPI process (`libra_hpc.mesh.mpi_process`): frames as they come, and its start.

- The process ends, or takes nothing -> `MpiLink.alive` is False, and ``ended`` is called once; the agent lives on.
- It asks by PMI, over the descriptor in ``PMI_FD`` -> it is answered here, but for a barrier, which is for rank 0.
- It aborts -> it is killed, as it would go on.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable

from libra_hpc.process.child_environment import LAUNCHER
from libra_hpc.protocol.callers import proof
from libra_hpc.protocol.codec import LENGTH, FrameBuffer
from libra_hpc.protocol.start_up import KeyValueSpace

from .mpi_process import PACKETS

BUFFER_BYTES = 4 << 20
"""Frames that wait for a process that is stopped; it is killed before there are as many."""


class MpiLink:
    def __init__(self, index: int, size: int, secret: bytes, world: int = 0) -> None:
        """Start the process, as one of ``size`` of a world of the run with this secret."""
        self._space = KeyValueSpace(size, f"{proof(secret, b'world')[:12].hex()}-{world}")
        self._socket, theirs = socket.socketpair()
        self._pmi, pmi = socket.socketpair()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
        kept = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER)}
        environment = kept | {"PMI_FD": str(pmi.fileno()), "PMI_RANK": str(index), "PMI_SIZE": str(size)}
        argv = [sys.executable, "-m", "libra_hpc.mesh.mpi_process", str(theirs.fileno()), str(os.getpid())]
        with theirs, pmi:
            passed = theirs.fileno(), pmi.fileno()
            self._process = subprocess.Popen(argv, env=environment, stdin=subprocess.DEVNULL, pass_fds=passed)
        self._buffer = FrameBuffer()
        self.alive = True
        self._ended: Callable[[], None] = lambda: None

    @property
    def pid(self) -> int:
        return self._process.pid

    def serve(
        self, received: Callable[[bytes, bytes], None], ended: Callable[[], None], barrier: Callable[[bytes], None]
    ) -> None:
        """Begin to carry frames.

        ``received`` gets the kind and content of each packet, ``barrier`` what the process has put before one.
        """
        self._ended = ended
        for ours in (self._socket, self._pmi):
            ours.setblocking(False)
        asyncio.get_running_loop().add_reader(self._socket, self._on_readable, received)
        asyncio.get_running_loop().add_reader(self._pmi, self._on_pmi, barrier)

    def send(self, frame: bytes) -> None:
        self._send(b"F", frame)

    def leave_out(self, index: int) -> None:
        """Send nothing to this member any more."""
        self._send(b"D", LENGTH.pack(index))

    def close(self) -> None:
        """Kill the process, whatever it does."""
        if self.alive:
            self.alive = False
            for ours in (self._socket, self._pmi):
                asyncio.get_running_loop().remove_reader(ours)
                ours.close()
            self._process.kill()
            # Its memory may be registered with an adapter, which takes time to give it back.
            threading.Thread(target=self._process.wait, daemon=True).start()
            self._ended()

    def release(self, others: Iterable[bytes]) -> None:
        """All are in the barrier, and have put this."""
        self._space.take(others)
        self._reply("cmd=barrier_out")

    def _reply(self, line: str) -> None:
        with contextlib.suppress(OSError):
            self._pmi.send(line.encode() + b"\n")

    def _on_pmi(self, barrier: Callable[[bytes], None]) -> None:
        lines: list[str] = []
        with contextlib.suppress(ConnectionError):
            lines = self._pmi.recv(65536).decode(errors="replace").splitlines()
        if not lines:
            asyncio.get_running_loop().remove_reader(self._pmi)
        for line in lines:
            if line.startswith("cmd=abort"):
                self.close()
                return
            if line.startswith("cmd=barrier_in"):
                barrier(self._space.put())
            elif reply := self._space.answer(line):
                self._reply(reply)

    def _send(self, kind: bytes, payload: bytes = b"") -> None:
        packet = PACKETS.frame((kind, payload))
        try:
            if self.alive and self._socket.send(packet) < len(packet):
                self.close()
        except OSError:
            self.close()

    def _on_readable(self, received: Callable[[bytes, bytes], None]) -> None:
        try:
            data = self._socket.recv(1 << 20)
        except OSError:
            data = b""
        if not data:
            self.close()
        for packet in self._buffer.feed(data):
            received(*PACKETS.decode(packet))
