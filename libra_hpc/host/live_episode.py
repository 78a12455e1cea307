"""An open episode of a host: one call of its code at a time, each under a deadline; `Episode.close` once, after all.

- What the call (start, step, truncated) itself awaits counts: a judge on the network, a sleep, a lock.
- Tool calls do not count: each has its own limit, and may wait for a free process before.
- The event loop was blocked -> the step gets that time again: nothing it waits for could be read.
- Beyond the limit -> the call ends at once, even when it ignores its cancellation.
"""

from __future__ import annotations

import asyncio
import sys
import traceback
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

from libra_hpc.process.progress import stall_of
from libra_hpc.tasks.base import Episode, ToolResult, Tools, Why

CANCEL_S = 0.5
"""Seconds for a cancelled call to clean up before `Episode.close` begins."""

CLOSE_S = 60.0
"""Most seconds of `Episode.close`: it may wait for a container to end, and nobody waits for it."""


class LiveEpisode:
    """``limit_s``: of each call outside its tool calls, 0: none."""

    def __init__(self, episode: Episode, tools: Tools, limit_s: float) -> None:
        self.episode, self.tools, self._limit_s = episode, tools, limit_s
        self.ready = False
        """Whether `Episode.start` has returned."""
        self.busy = False
        """Whether a call of its code is running."""
        self._last: Step | None = None

    def run(self, work: Work, over: Over) -> None:
        """Call the episode's code; ``over`` gets the result or the exception, unless `end` comes first."""
        self.busy = True
        self._last = Step(work, self.tools, limit_s=self._limit_s, over=self._free(over))
        self.episode.outside = self._last.outside

    async def result(self, work: Work) -> Any:
        """Call the episode's code, and return its result or its exception."""
        outcome: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.run(work, outcome.set_result)
        return await outcome

    def _free(self, over: Over) -> Over:
        def ended(outcome: object) -> None:
            self.busy = False
            over(outcome)

        return ended

    def end(self, why: Why) -> asyncio.Task[None]:
        """End it, once: the running call is cancelled, and the task returned closes the episode."""
        if self._last is not None:
            self._last.cancel()
        return asyncio.get_running_loop().create_task(self._close(why))

    async def _close(self, why: Why) -> None:
        if self._last is not None:
            await self._last.over(CANCEL_S)
        try:
            async with asyncio.timeout(CLOSE_S):
                await self.episode.close(why)
        except BaseException as error:
            print(f"host: the close of an episode failed ({why}):", file=sys.stderr)
            traceback.print_exception(error)


Work = Callable[[Tools], Coroutine[Any, Any, Any]]
"""A call of an episode's code."""
Over = Callable[[Any], None]
"""Gets what a call returned, or its exception."""


class StepTimeout(Exception):
    """A step exceeded its limit."""


class Step:
    """Runs ``work`` and calls ``over`` once, with its result or the exception; not after `cancel`."""

    def __init__(self, work: Work, tools: Tools, limit_s: float, over: Over) -> None:
        self._loop = asyncio.get_running_loop()
        self._over: Over | None = over
        self._limit_s = self._left_s = limit_s
        self._calls = 0
        """Tool calls in flight."""
        self._timer: asyncio.TimerHandle | None = None
        self._coroutine = self._run(work, _StepTools(self, tools))
        self._task = self._loop.create_task(self._coroutine)
        self._resume()

    def cancel(self) -> None:
        self._over = None
        self._pause()
        self._task.cancel()

    @contextmanager
    def outside(self) -> Iterator[None]:
        """Context of a tool call, whose time does not count."""
        self._calls += 1
        self._pause()
        try:
            yield
        finally:
            self._calls -= 1
            self._resume()

    async def over(self, most_s: float) -> None:
        """Wait, at most so long, until its code runs no more: a cancelled call may clean up."""
        await asyncio.wait({self._task}, timeout=most_s)

    async def _run(self, work: Work, tools: Tools) -> None:
        outcome: Any
        try:
            outcome = await work(tools)
        except BaseException as error:
            outcome = error  # also the task's own cancellation: the trajectory needs an answer
        self._end(outcome)

    def _end(self, outcome: Any) -> None:
        over, self._over = self._over, None
        self._pause()
        if over is not None:
            over(outcome)

    def _resume(self) -> None:
        if self._limit_s and self._over is not None and not self._calls and self._timer is None:
            self._timer = self._loop.call_later(self._left_s, self._overdue)

    def _pause(self) -> None:
        if self._timer is not None:
            self._left_s = max(0.0, self._timer.when() - self._loop.time())
            self._timer.cancel()
            self._timer = None

    def _overdue(self) -> None:
        assert self._timer is not None
        late_s = self._loop.time() - self._timer.when()
        self._timer, self._left_s = None, late_s
        if stall_of(late_s, 0.0):
            self._resume()
            return
        lines = suspended_at(self._coroutine)
        print("host: a step is overdue:", *lines, sep="\n  ", file=sys.stderr)
        place = lines[1] if len(lines) > 1 else lines[0]  # the first is this module's own
        self._end(StepTimeout(f"no answer within {self._limit_s:g} s outside tool calls; it waits at {place}"))
        self._task.cancel()


def suspended_at(coroutine: Any) -> list[str]:
    """Where a coroutine waits, outermost call first."""
    found = []
    while (frame := getattr(coroutine, "cr_frame", None)) is not None:
        code = frame.f_code
        found.append(f"{code.co_filename}:{frame.f_lineno} in {code.co_name}")
        coroutine = coroutine.cr_await
    return found


class _StepTools:
    """`Tools` whose calls stop a step's clock."""

    def __init__(self, step: Step, tools: Tools) -> None:
        self._step, self._tools = step, tools

    async def call(self, name: str, *args: Any, **named: Any) -> ToolResult:
        with self._step.outside():
            return await self._tools.call(name, *args, **named)

    async def python(self, code: str) -> ToolResult:
        with self._step.outside():
            return await self._tools.python(code)
