"""The clock of a step: what stops it."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from libra_hpc.host import step as steps
from libra_hpc.tasks.base import Episode, ToolResult, Tools, Turn


class Quick(Episode):
    """Waits a moment."""

    async def step(self, tokens: list[int], tools: Tools) -> Turn:
        await asyncio.sleep(0.05)
        return Turn([7])


class NoTools:
    async def call(self, name: str, *args: Any) -> ToolResult:
        raise KeyError(name)

    async def python(self, code: str) -> ToolResult:
        raise KeyError("python")


def outcome(limit_s: float, stall_s: float) -> Turn | BaseException:
    """How a step ends when the loop is blocked at its beginning."""

    async def inside() -> Turn | BaseException:
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[Turn | BaseException] = loop.create_future()
        loop.call_later(0.01, time.sleep, stall_s)
        step = steps.Step(Quick(), [1], NoTools(), limit_s, ended.set_result)
        found = await ended
        step.cancel()
        return found

    return asyncio.run(inside())


def test_the_time_of_a_blocked_loop_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "STALL_S", 0.1)
    assert outcome(0.2, 0.5) == Turn([7])
    monkeypatch.setattr(steps, "STALL_S", 10.0)
    assert isinstance(outcome(0.2, 0.5), steps.StepTimeout)
