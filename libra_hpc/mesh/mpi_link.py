"""The agent's end of its MPI process (`libra_hpc.mesh.mpi_process`): the meeting, then frames as they come.

- The process ends, or takes nothing -> `MpiLink.alive` is False, and ``ended`` is called once; the agent lives on.
- It does not answer during the meeting within `MEET_S` -> it is killed, and `NoWorld` is raised.
- PMI -> its lines come by the descriptor in ``PMI_FD``, from Slurm, from local ranks, or from rank 0 (`Publisher`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable

from libra_hpc.errors import OperationError
from libra_hpc.process.child_environment import of_rank
from libra_hpc.protocol.codec import LENGTH, FrameBuffer

from .mpi_process import PACKETS, Packet

MEET_S = 90
"""A start takes seconds; nodes that load Python from a cold shared file system come up to a minute apart."""
BUFFER_BYTES = 4 << 20
"""Frames that wait for a process that is stopped; it is killed before there are as many."""


class NoWorld(OperationError):
    """The ranks cannot go on together; ``rank`` is the own one, -1 where they have not met."""

    def __init__(self, problem: str, rank: int = -1) -> None:
        super().__init__(problem)
        self.rank = rank


class MpiLink:
    def __init__(self, index: int = 0, size: int = 0, ask: Callable[[str], None] | None = None) -> None:
        """Start the process; ``ask`` gets its lines of PMI where it does not meet those of this node's start.

        ``index`` and ``size`` are its place then.
        """
        self._socket, theirs = socket.socketpair()
        self._pmi, pmi = socket.socketpair()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
        environment = of_rank(os.environ)
        if ask is not None:
            environment = of_rank(os.environ, PMI_FD=str(pmi.fileno()), PMI_RANK=str(index), PMI_SIZE=str(size))
            asyncio.get_running_loop().add_reader(self._pmi, self._on_pmi, ask)
        number = environment.get("PMI_FD", "")
        passed = (theirs.fileno(), *([int(number)] if number.isdigit() else []))
        argv = [sys.executable, "-m", "libra_hpc.mesh.mpi_process", str(theirs.fileno()), str(os.getpid())]
        with theirs, pmi:
            self._process = subprocess.Popen(argv, env=environment, stdin=subprocess.DEVNULL, pass_fds=passed)
        self._deadline, self._buffer, self._waiting = time.monotonic() + MEET_S, FrameBuffer(), list[Packet]()
        self.alive = True
        self._ended: Callable[[], None] = lambda: None

    @property
    def pid(self) -> int:
        return self._process.pid

    # --- the meeting

    def met(self) -> tuple[int, int]:
        """Rank and size of the world, once all are there."""
        place = self._answer(b"M")
        return LENGTH.unpack_from(place)[0], LENGTH.unpack_from(place, LENGTH.size)[0]

    def ask(self, kind: bytes, payload: bytes) -> bytes:
        """Take part in a collective."""
        self._send(kind, payload)
        return self._answer(kind)

    def finish(self) -> None:
        """End the process with those of all others."""
        self._send(b"Q")
        try:
            self._answer(b"Q")
        except NoWorld:
            self.close()

    def _answer(self, kind: bytes) -> bytes:
        while not self._waiting:
            left_s = self._deadline - time.monotonic()
            if left_s <= 0.0 or not select.select([self._socket], [], [], left_s)[0]:
                self.close()
                raise NoWorld(f"the ranks did not meet within {MEET_S} s")
            data = self._socket.recv(1 << 20)
            if not data:
                self.close()
                raise NoWorld("the MPI process of this rank ended while the ranks met; its output is above")
            self._waiting += map(PACKETS.decode, self._buffer.feed(data))
        answered, content = self._waiting.pop(0)
        assert answered == kind
        return content

    # --- frames

    def serve(self, received: Callable[[bytes, bytes], None], ended: Callable[[], None]) -> None:
        """Begin to carry frames; ``received`` gets the kind and content of each packet."""
        self._ended = ended
        self._send(b"L")
        self._socket.setblocking(False)
        asyncio.get_running_loop().add_reader(self._socket, self._on_readable, received)

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
                with contextlib.suppress(RuntimeError):  # it ended before there was a loop
                    asyncio.get_running_loop().remove_reader(ours)
                ours.close()
            self._process.kill()
            # Its memory may be registered with an adapter, which takes time to give it back.
            threading.Thread(target=self._process.wait, daemon=True).start()
            self._ended()

    def reply(self, line: str) -> None:
        """Answer a line of PMI."""
        with contextlib.suppress(OSError):
            self._pmi.send(line.encode() + b"\n")

    def _on_pmi(self, ask: Callable[[str], None]) -> None:
        lines = self._pmi.recv(65536).decode().splitlines()
        for line in lines:
            ask(line)
        if not lines:
            asyncio.get_running_loop().remove_reader(self._pmi)

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
