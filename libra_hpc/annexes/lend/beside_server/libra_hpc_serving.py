"""ASGI middleware for a server whose GPU is lent: it writes what is served to a page shared with the guest.

- A POST or a websocket, whatever its path -> somebody is served until it ends.
- An engine behind this process runs requests, or has some wait -> they are served, too, also after their POST ended.
- A request begins or ends, and every `BEAT_S` -> this process's slot of the page is written.
- An engine behind this process gives a first token -> its seconds are kept, as beside the guest or alone.
- The page cannot be used -> one line on stderr, and the server serves on as without this file.

Only the standard library, Python 3.8 or newer.  ``vllm serve ... --middleware libra_hpc_serving.Watch``; in another
ASGI server ``app = Watch(app)``.
"""

from __future__ import annotations

import asyncio
import atexit
import fcntl
import mmap
import os
import struct
import sys
import time
from collections import Counter, deque
from typing import Any, Callable, Iterator  # noqa: UP035

VARIABLE = "LIBRA_HPC_SERVING_PAGE"
"""Environment variable with the path of the page."""
PAGE_BYTES = 4096
HEAD = struct.Struct("<8sIIQ")
"""Slot 0: `MAGIC`, `FORMAT`, 1 while the owner gives nothing, and `time.monotonic_ns` of the end of the guest's last
step."""
MAGIC, FORMAT = b"LIBRASRV", 4
SLOT_BYTES, SLOTS = 64, 64
SLOT = struct.Struct("<IIQIII")
"""Slots 1 to 63, one per server process: its id (0: free), sequence (odd while it is written), `time.monotonic_ns` of
the write, requests it serves, `FirstTokens.p99` in microseconds."""
BEAT_S = 0.25
"""Half: twice the wake-ups of an idle server; double: the guest stops for a server that is only slow."""
DEAD_S = 2.0
"""Without a write, until the slot of a process that has ended is free."""
COUNTED_S = 5.0
"""Seconds for which an engine's counts hold: of several processes before one engine, each step's go to one.  Half: a
long step counts as idle where no request is open; double: the guest waits as long for what has ended."""
KEPT, LEAST = 512, 20
"""First tokens that are kept, alone and beside the guest, and that a 99 % quantile needs.  Half: one burst decides it;
double: it follows the traffic in twice the time."""
ENGINES: dict = {}  # type: ignore[type-arg]
"""By number of the engine behind this process: `time.monotonic` of its last step, requests that run and wait;
written by `libra_hpc_serving_engines`."""
FIRST: deque = deque(maxlen=KEPT)  # type: ignore[type-arg]
"""Seconds from a request's arrival to its first token, of those since the last beat; written by it, too."""


class Slot:
    """The slot of this process in the page at ``path``; raises `OSError` or `ValueError` where there is none."""

    def __init__(self, path: str) -> None:
        self.sequence = 0
        with open(path, "r+b") as file:
            self.page = mmap.mmap(file.fileno(), PAGE_BYTES)
            if HEAD.unpack_from(self.page)[:2] != (MAGIC, FORMAT):
                raise ValueError("it is no page of this format")
            fcntl.flock(file, fcntl.LOCK_EX)
            try:
                self.offset = next(free_slots(self.page), 0)
                if not self.offset:
                    raise ValueError("all its slots are taken")
                self.write(0)
            finally:
                # The map has a descriptor of its own, which would hold the lock.
                fcntl.flock(file, fcntl.LOCK_UN)

    def write(self, served: int, p99: tuple[float, float] = (0.0, 0.0)) -> None:
        pid, now, micros = os.getpid(), time.monotonic_ns(), [int(1e6 * min(seconds, 4000.0)) for seconds in p99]
        struct.pack_into("<II", self.page, self.offset, pid, self.sequence + 1)
        SLOT.pack_into(self.page, self.offset, pid, self.sequence + 1, now, served, *micros)
        self.sequence = (self.sequence + 2) % (1 << 32)
        struct.pack_into("<I", self.page, self.offset + 4, self.sequence)

    def guest_stepped(self) -> int:
        """`time.monotonic_ns` of the end of the guest's last step."""
        return int(HEAD.unpack_from(self.page)[3])

    def free(self) -> None:
        struct.pack_into("<I", self.page, self.offset, 0)


def free_slots(page: mmap.mmap) -> Iterator[int]:
    """Offsets of slots that no live process has."""
    for offset in range(SLOT_BYTES, SLOTS * SLOT_BYTES, SLOT_BYTES):
        pid, _, written = SLOT.unpack_from(page, offset)[:3]
        # The id of a process in a container may be nobody's here.
        silent = time.monotonic_ns() - written > DEAD_S * 1e9
        if pid == 0 or (silent and not os.path.exists("/proc/%d" % pid)):  # noqa: UP031
            yield offset


class FirstTokens:
    """Seconds until first tokens: *beside* a guest where a step of it ended since users came, else *alone*."""

    def __init__(self) -> None:
        self.alone, self.beside = deque(maxlen=KEPT), deque(maxlen=KEPT)  # type: ignore[var-annotated]
        """Seconds, and the requests served then, as a power of 2."""

    def add(self, seconds: float, served: int, beside: bool) -> None:
        """``served``: requests in flight."""
        (self.beside if beside else self.alone).append((seconds, served.bit_length()))

    def p99(self) -> tuple[float, float]:
        """Seconds alone, at the loads of those beside, and beside; 0: too few are known."""
        alone, beside = (Counter(load for _, load in kept) for kept in (self.alone, self.beside))
        enough = len(self.beside) >= LEAST
        weighted = [(seconds, beside[load] / alone[load] if enough else 1.0) for seconds, load in self.alone]
        return high(weighted), high([(seconds, 1.0) for seconds, _ in self.beside])


def high(weighted: list[tuple[float, float]]) -> float:
    """The 99 % quantile of numbers with weights; 0: too few."""
    left = 0.01 * sum(weight for _, weight in weighted)
    for number, weight in sorted(weighted, reverse=True) if len(weighted) >= LEAST else []:
        left -= weight
        if left < 0.0:
            return number
    return 0.0


class Watch:
    """The middleware around ``app``."""

    def __init__(self, app: Any) -> None:
        self.app = app
        self.slot: Slot | None = None
        self.loop: asyncio.AbstractEventLoop | None = None
        self.open = 0
        """Requests."""
        self.came = 0
        """`time.monotonic_ns` when users came after a time without any."""
        self.first, self.p99 = FirstTokens(), (0.0, 0.0)
        self.failed = False

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if self.loop is None and not self.failed:
            self.try_to(self.begin)
        if scope["type"] != "websocket" and scope.get("method") != "POST":
            await self.app(scope, receive, send)
            return
        self.try_to(self.count, 1)
        try:
            await self.app(scope, receive, send)
        finally:
            self.try_to(self.count, -1)

    def try_to(self, what: Callable[..., None], *arguments: Any) -> None:
        """Never raise into the server; after a failure do nothing more."""
        if self.failed:
            return
        try:
            what(*arguments)
        except Exception as error:
            self.failed, self.slot = True, None
            print("libra_hpc_serving: no request is counted here: %r" % (error,), file=sys.stderr)  # noqa: UP031

    def begin(self) -> None:
        """Claim a slot, and write it from now on."""
        path = os.environ.get(VARIABLE)
        if not path:
            raise ValueError(VARIABLE + " is not set")
        self.loop = asyncio.get_running_loop()
        self.slot = Slot(path)
        atexit.register(self.slot.free)
        self.beat()

    def beat(self) -> None:
        """Record that the server's loop runs."""
        self.try_to(self.count, 0)
        if self.loop is not None and not self.failed:
            self.loop.call_later(BEAT_S, self.beat)

    def count(self, more: int) -> None:
        served = self.served()
        if self.slot is not None:
            beside = self.slot.guest_stepped() > self.came
            while FIRST:
                self.first.add(FIRST.popleft(), served, beside)
        if more > 0 and not served:
            self.came = time.monotonic_ns()
        self.open += more
        if self.slot is not None:
            self.p99 = self.p99 if more else self.first.p99()
            self.slot.write(self.served(), self.p99)

    def served(self) -> int:
        """Requests that came, or that engines which have stepped lately count."""
        since = time.monotonic() - COUNTED_S
        return max(self.open, sum(requests for at, requests in ENGINES.values() if at > since))
