"""Waiting for what another process, thread or task does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

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
