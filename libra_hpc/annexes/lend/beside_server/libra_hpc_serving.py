"""ASGI middleware for a server whose GPU is lent: it writes what is served to a page shared with the guest.

- A POST or a websocket, whatever its path -> somebody is served until it ends.
- An engine behind this process runs requests, or has some wait -> they are served, too, also after their POST ended.
- A request begins or ends, and every `BEAT_S` -> this process's slot of the page is written.
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
from typing import Any, Callable, Iterator  # noqa: UP035

VARIABLE = "LIBRA_HPC_SERVING_PAGE"
"""Environment variable with the path of the page."""
PAGE_BYTES = 4096
HEAD = struct.Struct("<8sII")
"""Slot 0, of the lender: `MAGIC`, `FORMAT`, and 1 while the owner gives nothing."""
MAGIC, FORMAT = b"LIBRASRV", 2
SLOT_BYTES, SLOTS = 64, 64
SLOT = struct.Struct("<IIQII")
"""Slots 1 to 63, one per server process: its id (0: free), sequence (odd while it is written), `time.monotonic_ns` of
the write, requests it serves, thousandths of its KV caches in use."""
BEAT_S = 0.25
"""Half: twice the wake-ups of an idle server; double: the guest stops for a server that is only slow."""
DEAD_S = 2.0
"""Without a write, until the slot of a process that has ended is free."""
COUNTED_S = 5.0
"""Seconds for which an engine's counts hold: of several processes before one engine, each step's go to one.  Half: a
long step counts as idle where no request is open; double: the guest waits as long for what has ended."""
ENGINES: dict = {}  # type: ignore[type-arg]
"""By number of the engine behind this process: `time.monotonic` of its last step, requests that run and wait, share of
its KV caches in use; written by `libra_hpc_serving_engines`."""


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
                self.write(0, 0)
            finally:
                # The map has a descriptor of its own, which would hold the lock.
                fcntl.flock(file, fcntl.LOCK_UN)

    def write(self, served: int, kv_use: int) -> None:
        pid, now = os.getpid(), time.monotonic_ns()
        struct.pack_into("<II", self.page, self.offset, pid, self.sequence + 1)
        SLOT.pack_into(self.page, self.offset, pid, self.sequence + 1, now, served, kv_use)
        self.sequence = (self.sequence + 2) % (1 << 32)
        struct.pack_into("<I", self.page, self.offset + 4, self.sequence)

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


class Watch:
    """The middleware around ``app``."""

    def __init__(self, app: Any) -> None:
        self.app = app
        self.slot: Slot | None = None
        self.loop: asyncio.AbstractEventLoop | None = None
        self.open = 0
        """Requests."""
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
        self.open += more
        if self.slot is None:
            return
        since = time.monotonic() - COUNTED_S
        fresh = [(requests, kv_use) for at, requests, kv_use in ENGINES.values() if at > since]
        inside = sum(requests for requests, _ in fresh)
        self.slot.write(max(self.open, inside), int(1000 * max([kv_use for _, kv_use in fresh], default=0.0)))
