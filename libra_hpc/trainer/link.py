"""A worker process's end of the socket to its agent.

- Any thread may send.
- `Pulse` reports the process's phase once a second.
- While the process waits for peers, `interrupted` reads orders that end the wait; they are handled in order later.

Needs no torch: the simulated trainer uses it too.
"""

from __future__ import annotations

import select
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from libra_hpc.protocol.codec import EngineSocket
from libra_hpc.protocol.trainer import FromWorker, Join, Standby, StopWorker, WorkerHeartbeat, from_worker, to_worker


class WorkerSocket(EngineSocket[FromWorker]):
    """See the module docstring. The socket stays blocking: a receiver must not change the mode under a sender."""

    def __init__(self, path: str) -> None:
        super().__init__(path, to_worker, from_worker)
        self._ahead: deque[Any] = deque()
        self._sending = threading.Lock()
        self._poll = select.poll()
        self._poll.register(self.fileno(), select.POLLIN)

    def send(self, message: FromWorker) -> None:
        with self._sending:
            super().send(message)

    def send_many(self, messages: Sequence[FromWorker]) -> None:
        with self._sending:
            super().send_many(messages)

    def receive(self, timeout: float | None = None) -> Any | None:
        """As in the base class; messages that `interrupted` read come first."""
        if self._ahead:
            return self._ahead.popleft()
        return self._next(timeout)

    def interrupted(self) -> bool:
        """Whether an order arrived that ends an unfinished join or step; raises `EOFError` when the agent is gone."""
        while (message := self._next(0.0)) is not None:
            self._ahead.append(message)
        return any(isinstance(message, Join | Standby | StopWorker) for message in self._ahead)

    def _next(self, timeout: float | None) -> Any | None:
        if timeout is not None and not self._pending and not self._poll.poll(1000.0 * timeout):
            return None
        return super().receive()


ALIVE_S = 1.0
"""Seconds between two reports."""
IDLE, COMPUTE, WAITING = "idle", "compute", "waiting for peers"
SNAPSHOT, CHECKPOINT, LOAD = "snapshot", "checkpoint", "load"
STORAGE = (SNAPSHOT, CHECKPOINT, LOAD)
"""Phases that read a saved state, or copy one to host memory once the write before has ended; orders wait."""


class Pulse:
    """Reports the process's phase from a thread of its own."""

    def __init__(self, socket: WorkerSocket) -> None:
        self._socket = socket
        self._now = (IDLE, time.monotonic())
        threading.Thread(target=self._run, name="pulse", daemon=True).start()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        before, self._now = self._now, (name, time.monotonic())
        try:
            yield
        finally:
            self._now = (before[0], time.monotonic())

    def _run(self) -> None:
        while True:
            name, since = self._now
            try:
                self._socket.send(WorkerHeartbeat(name, time.monotonic() - since))
            except OSError:
                return  # the agent is gone; the main thread notices too
            time.sleep(ALIVE_S)
