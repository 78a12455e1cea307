"""Waiting for what another process, thread or task does, and whether a process runs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

PATIENCE_S = 120.0
"""Longest wait before a test fails: a process starts slowly on a busy machine."""
EVERY_S = 0.01


async def until(condition: Callable[[], object], limit_s: float = PATIENCE_S) -> None:
    async with asyncio.timeout(limit_s):
        while not condition():
            await asyncio.sleep(EVERY_S)


def wait_until(condition: Callable[[], object], limit_s: float = PATIENCE_S) -> None:
    """The same without a loop."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(EVERY_S)


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and waits for its parent does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
