"""ASGI middleware for a server whose GPU is lent: it counts requests and writes them to a page shared with the guest.

- A request for tokens arrives -> it waits, until the first bytes of its answer; then it gets tokens, until it ends.
- After each change, and every `BEAT_S` -> this process's slot of the page is written.
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
from collections import OrderedDict
from typing import Any, Awaitable, Callable, Iterator  # noqa: UP035

VARIABLE = "LIBRA_HPC_SERVING_PAGE"
"""Environment variable with the path of the page."""
PAGE_BYTES = 4096
HEAD = struct.Struct("<8sII")
"""Slot 0, of the lender: `MAGIC`, `FORMAT`, and 1 while the owner gives nothing."""
MAGIC, FORMAT = b"LIBRASRV", 1
SLOT_BYTES, SLOTS = 64, 64
SLOT = struct.Struct("<IIQIIQQQQII")
"""Slots 1 to 63, one per server process: its id (0: free), sequence (odd while it is written), `time.monotonic_ns` of
the write, requests it serves, those of them that wait, `monotonic_ns` of the oldest arrival of the waiting and of the
oldest last token (0: none), bytes of the bodies of the waiting, requests so far, low bits of the number of parts of
answers so far, thousandths of its KV caches in use."""
BEAT_S = 0.25
"""Half: twice the wake-ups of an idle server; double: the guest stops for a server that is only slow."""
DEAD_S = 2.0
"""Without a write, until the slot of a process that has ended is free."""
KV_USE: dict = {}  # type: ignore[type-arg]
"""By number of the engine behind this process: share of its KV caches in use; written by `libra_hpc_serving_kv`."""
ENDINGS = ("/completions", "/responses", "/messages", "/embeddings", "/generate", "/score", "/rerank", "/pooling")
"""Ends of the paths whose requests take the GPU."""

Message = Any
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class Request:
    """One that is served."""

    def __init__(self) -> None:
        self.arrival = time.monotonic_ns()
        self.bytes = 0


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
                self.write(*[0] * 8)
            finally:
                # The map has a descriptor of its own, which would hold the lock.
                fcntl.flock(file, fcntl.LOCK_UN)

    def write(self, *counts: int) -> None:
        """Write what follows the time in `SLOT`."""
        pid, now = os.getpid(), time.monotonic_ns()
        struct.pack_into("<II", self.page, self.offset, pid, self.sequence + 1)
        SLOT.pack_into(self.page, self.offset, pid, self.sequence + 1, now, *counts)
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
        self.waiting: OrderedDict[Request, None] = OrderedDict()
        """In order of arrival."""
        self.streaming: OrderedDict[Request, int] = OrderedDict()
        """Time of the last token, the oldest first."""
        self.bytes = self.total = self.parts = 0
        self.failed = self.changed = False

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        if self.loop is None and not self.failed:
            self.try_to(self.begin)
        if self.slot is None or scope["type"] != "http" or not scope["path"].rstrip("/").endswith(ENDINGS):
            await self.app(scope, receive, send)
            return
        request = Request()

        async def counting_receive() -> Message:
            message = await receive()
            body = message.get("body") if message["type"] == "http.request" else b""
            if body and request in self.waiting:
                request.bytes += len(body)
                self.bytes += len(body)
            return message

        async def counting_send(message: Message) -> None:
            if message["type"] == "http.response.body" and message.get("body"):
                self.try_to(self.token, request)
            await send(message)

        self.try_to(self.arrived, request)
        try:
            await self.app(scope, counting_receive, counting_send)
        finally:
            self.try_to(self.left, request)

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
        self.try_to(self.write)
        if self.loop is not None and not self.failed:
            self.loop.call_later(BEAT_S, self.beat)

    def arrived(self, request: Request) -> None:
        self.total += 1
        self.waiting[request] = None
        self.write()

    def token(self, request: Request) -> None:
        if request in self.waiting:
            self.answered(request)
        self.parts = (self.parts + 1) % (1 << 32)
        self.streaming[request] = time.monotonic_ns()
        self.streaming.move_to_end(request)
        if not self.changed and self.loop is not None:
            # The streams of one engine step send in one round of the loop.
            self.changed = True
            self.loop.call_soon(self.try_to, self.write)

    def answered(self, request: Request) -> None:
        del self.waiting[request]
        self.bytes -= request.bytes

    def left(self, request: Request) -> None:
        if request in self.waiting:
            self.answered(request)
        self.streaming.pop(request, None)
        self.write()

    def write(self) -> None:
        self.changed = False
        if self.slot is None:
            return
        waiting = len(self.waiting)
        self.slot.write(
            waiting + len(self.streaming),
            waiting,
            next(iter(self.waiting)).arrival if waiting else 0,
            next(iter(self.streaming.values())) if self.streaming else 0,
            self.bytes,
            self.total,
            self.parts,
            int(1000 * max(KV_USE.values(), default=0.0)),
        )
