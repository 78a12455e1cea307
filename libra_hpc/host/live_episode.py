"""An open episode of a host: one call of its code at a time, and `Episode.close` once, behind the last one."""

from __future__ import annotations

import asyncio
import sys
import traceback
from typing import Any

from libra_hpc.tasks.base import Episode, Tools, Why

from .step import Over, Step, Work

CANCEL_S = 0.5
"""Seconds for a cancelled call to clean up before `Episode.close` begins."""

CLOSE_S = 60.0
"""Most seconds of `Episode.close`: it may wait for a container to end, and nobody waits for it."""


class LiveEpisode:
    """``limit_s``: of each call outside its tool calls, 0: none."""

    def __init__(self, episode: Episode, tools: Tools, limit_s: float) -> None:
        self.episode, self._tools, self._limit_s = episode, tools, limit_s
        self.ready = False
        """Whether `Episode.start` has returned."""
        self.busy = False
        """Whether a call of its code is running."""
        self._last: Step | None = None

    def run(self, work: Work, over: Over) -> None:
        """Call the episode's code; ``over`` gets the result or the exception, unless `end` comes first."""
        self.busy = True
        self._last = Step(work, self._tools, limit_s=self._limit_s, over=self._free(over))

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
