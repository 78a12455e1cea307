"""The environment host processes of the rollout leader: started, watched, ended when they hang, restarted.

- A start or a sign of life misses its deadline -> event ``hung``, stacks into the log, SIGKILL.
- Until a host has answered a step, a sign of life may take the first deadline: a task may load its data late.
- After that the limit is the task's own longest step or tool (`HostReady.busy_s`) where that is longer than measured.
- More than half of a deadline has passed -> event ``slow``, once.
- A host ended -> another follows after `RESTART_S` for every end in the window (`NO_START_S` where it did not start).
- More ends than `RestartBudget` allows -> the run fails.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from typing import Any

from libra_hpc.agent.commands import host_command, host_settings
from libra_hpc.errors import error_text
from libra_hpc.host.settings import write_private
from libra_hpc.mesh.agent_context import AgentContext
from libra_hpc.process.budget import RestartBudget
from libra_hpc.process.child import Child
from libra_hpc.process.deadlines import Deadlines
from libra_hpc.protocol.env import EpisodeStepped, HostAlive, HostReady, ToHost, from_host, to_host

RESTART_S = 0.5
"""After one end in the window; two ends wait twice as long."""
NO_START_S = 5.0
"""Where the system refuses a process or its log: a full disk has 75 s to get room before the budget is spent."""
START, LIFE = "start of environment host", "sign of life of environment host"


class Hosts:
    """``message`` gets what a host sends, ``down`` hears that another has followed a dead one, ``fail`` ends the
    run."""

    def __init__(
        self,
        context: AgentContext,
        message: Callable[[int, Any], None],
        down: Callable[[int, str], None],
        fail: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._context, self._message, self._down, self._fail, self._clock = context, message, down, fail, clock
        count = context.config.task.hosts
        self._children: list[Child | None] = [None] * count
        self._budgets = [RestartBudget(context.config.deadlines.restarts) for _ in range(count)]
        self._deadlines = Deadlines(context.config.deadlines)
        self._slow: set[int] = set()
        self._first_s = context.config.deadlines.first_s
        self._busy_s = [self._first_s] * count
        """Longest pause between signs of life that is no fault, whatever was measured."""
        self._declared_s = [0.0] * count
        self._lost: dict[int, str] = {}
        """Hosts that ended and whose next one is not announced, with the reason."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = False

    async def start(self) -> None:
        for host in range(len(self._children)):
            await self._start(host)

    async def stop(self) -> None:
        self._stopping = True
        await asyncio.gather(*(child.stop() for child in self._children if child is not None))

    def send(self, host: int, message: ToHost) -> None:
        """Send one message; to a host that is gone it is dropped."""
        child = self._children[host]
        if child is not None and host not in self._lost:
            child.send(message)

    def discount(self, seconds: float) -> None:
        self._deadlines.discount(seconds)

    def watch(self) -> None:
        now = self._clock()
        for pending in self._deadlines.pending(now):
            host = int(str(pending.key))
            hopeless = self._deadlines.exceeded(host)
            self._context.log("hung", part=f"environment host {host}", reason=f"The {pending.sentence}.")
            if hopeless:
                self._fail(f"{hopeless}; see {self._context.logs}/host{host}.log")
            child = self._children[host]
            if child is not None:
                self._task(child.end_hung())
        for pending in self._deadlines.pending(now, 0.5):
            host = int(str(pending.key))
            if host not in self._slow:
                self._slow.add(host)
                self._context.log("slow", part=f"environment host {host}", reason=f"The {pending.sentence}.")

    async def _start(self, host: int) -> bool:
        """False when it could not be started; another attempt follows."""
        context = self._context
        child = Child(
            f"host{host}",
            context.private / f"host{host}.sock",
            outbound=to_host,
            inbound=from_host,
            on_message=self._received,
            on_exit=self._exited,
        )
        self._children[host] = child
        self._deadlines.begin(START, host, self._clock())
        settings = context.private / f"host{host}.json"
        try:
            write_private(settings, host_settings(context.config))
            await child.start(
                host_command(context.config, settings), dict(os.environ), context.logs / f"host{host}.log"
            )
        except OSError as error:
            self._ended(host, f"environment host cannot be started: {error_text(error)}", NO_START_S)
            return False
        return True

    def _received(self, child: Child, message: Any) -> None:
        host, now = self._children.index(child), self._clock()
        self._slow.discard(host)
        self._announce(host)
        if isinstance(message, HostReady):
            self._busy_s[host], self._declared_s[host] = max(self._first_s, message.busy_s), message.busy_s
        elif isinstance(message, EpisodeStepped):
            self._busy_s[host] = self._declared_s[host]
        # Only signs of life come at a fixed pace; an answer is one too, but its time is not measured.
        if isinstance(message, HostReady | HostAlive):
            self._deadlines.end(host, now)
        self._deadlines.begin(LIFE, host, now, self._busy_s[host])
        self._message(host, message)

    def _exited(self, child: Child, code: int) -> None:
        if self._stopping:
            return
        self._ended(self._children.index(child), f"environment host ended with {code}", RESTART_S)

    def _ended(self, host: int, reason: str, after_s: float) -> None:
        self._deadlines.forget(host)
        self._lost[host] = reason
        budget = self._budgets[host]
        self._context.log("host_lost", host=host, reason=reason)
        if budget.spend(self._clock()):
            self._task(self._restart(host, after_s * budget.spent))
        else:
            self._fail(
                f"{reason}, {budget.spent} times in {budget.window_s:.0f} s; see {self._context.logs}/host{host}.log"
            )

    async def _restart(self, host: int, after_s: float) -> None:
        await asyncio.sleep(after_s)
        if not self._stopping and await self._start(host):
            self._announce(host)

    def _announce(self, host: int) -> None:
        """Report the end of the host before, so that its episodes are opened in this one before any other message."""
        reason = self._lost.pop(host, None)
        if reason is not None:
            self._down(host, reason)

    def _task(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
