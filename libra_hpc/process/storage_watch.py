"""How long the file system of the run directory takes to answer on a node.

- Every `EVERY_S` -> a file is opened in a thread, which no cache of a network file system answers alone.
- That takes longer than `SLOW_S` -> a sentence, also while it still waits, and again every `REPEAT_S`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from pathlib import Path

EVERY_S = 5.0
"""Half: twice the calls of all nodes; double: a slow minute is one sample."""
SLOW_S = 1.0
"""A healthy file system answers in milliseconds, a busy one in tenths of a second."""
REPEAT_S = 60.0
"""A notice is shown for two minutes, so one that lasts stays."""


class StorageWatch:
    def __init__(self, file: Path, report: Callable[[str], object]) -> None:
        self._file, self._report = file, report
        self._reported_at = float("-inf")
        self.waited_s = 0.0
        """All of the calls above `SLOW_S`."""

    async def run(self) -> None:
        """Watch the file system, until cancelled."""
        while True:
            await asyncio.sleep(EVERY_S)
            began, call = time.monotonic(), asyncio.ensure_future(asyncio.to_thread(self._open))
            while not (await asyncio.wait({call}, timeout=SLOW_S))[0]:
                self._slow(time.monotonic() - began)
            if (took_s := time.monotonic() - began) > SLOW_S:
                self.waited_s += took_s

    def _slow(self, so_far_s: float) -> None:
        now = time.monotonic()
        if now - self._reported_at >= REPEAT_S:
            self._reported_at = now
            sentence = f"waiting for storage: opening {self._file} takes {so_far_s:.0f} s so far"
            self._report(f"{sentence}, {self.waited_s + so_far_s:.0f} s in all")

    def _open(self) -> None:
        # Those who need it report that it cannot be opened.
        with contextlib.suppress(OSError):
            self._file.open("rb").close()
