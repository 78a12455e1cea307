"""The environment host processes of the rollout leader: started, watched, ended when they hang, restarted.

- A start or a sign of life misses its deadline, or is late -> as `Supervised`.
- Until a host has answered a step, a sign of life may take the first deadline: a task may load its data late.
- After that the limit is the task's own longest step or tool (`HostReady.busy_s`) where that is longer than measured.
- A host ended -> another follows after `RESTART_S` for every end in the window (`NO_START_S` where it did not start).
- Temporary files of a host and its tools are in a folder of that process, which is removed when it ended.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from shutil import rmtree
from typing import Any, Protocol

from msgspec import structs

from libra_hpc.agent.commands import host_command, host_settings
from libra_hpc.agent.supervised import NO_START_S, ChildCommand, Supervised, Supervisor
from libra_hpc.errors import error_text
from libra_hpc.host.settings import write_private
from libra_hpc.mesh.agent_context import AgentContext
from libra_hpc.process.child import Child
from libra_hpc.process.deadlines import Deadlines
from libra_hpc.protocol.env import ChatChoice, EpisodeStepped, HostHeartbeat, HostReady, ToHost, from_host, to_host

RESTART_S = 0.5
"""After one end in the window; two ends wait twice as long."""
REMOVE_S, REMOVALS = 1.0, 8
"""Seconds between two attempts to remove the folder of an ended host, and how many: what its tools left behind lives
until the agent's next look (`libra_hpc.agent.agent.REAP_S`), and may write until then.
"""
START, LIFE = "start of environment host", "sign of life of environment host"


class HostListener(Protocol):
    """The rollout leader."""

    def on_host(self, host: int, message: Any) -> None:
        """A host's message."""

    def on_host_down(self, host: int, reason: str) -> None:
        """A host ended, and another has followed it."""


class Hosts(Supervisor):
    outbound, inbound = to_host, from_host

    def __init__(
        self, context: AgentContext, listener: HostListener, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._context, self._listener, self._clock = context, listener, clock
        count = context.config.task.hosts
        self._hosts = [Supervised(context, self, f"environment host {host}") for host in range(count)]
        self._deadlines = Deadlines(context.config.deadlines)
        self._first_s = context.config.deadlines.first_s
        self._busy_s = [self._first_s] * count
        """Longest pause between signs of life that is no fault, whatever was measured."""
        self._declared_s = [0.0] * count
        self._lost: dict[int, str] = {}
        """Hosts that ended and whose next one is not announced, with the reason."""
        self._folders: dict[int, Path] = {}
        self._chats: set[ChatChoice] = set()
        """Chat formats that have an event already."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = False

    async def start(self) -> None:
        for host in range(len(self._hosts)):
            await self._start(host)

    async def stop(self) -> None:
        self._stopping = True
        await asyncio.gather(*(host.stop() for host in self._hosts))

    def send(self, host: int, message: ToHost) -> None:
        """Send one message; to a host that is gone it is dropped."""
        if host not in self._lost:
            self._hosts[host].send(message)

    def discount(self, seconds: float) -> None:
        self._deadlines.discount(seconds)

    def watch(self) -> None:
        now = self._clock()
        for one in self._hosts:
            one.limit_logs()
        for pending in self._deadlines.pending(now):
            host = int(str(pending.key))
            self._deadlines.exceeded(host)
            self._task(self._hosts[host].end_hung(f"The {pending.sentence}."))
        for pending in self._deadlines.late(now):
            self._hosts[int(str(pending.key))].slow(f"The {pending.sentence}.")

    async def _start(self, host: int) -> bool:
        """False when it could not be started; another attempt follows."""
        context, name = self._context, f"host{host}"
        self._deadlines.begin(START, host, self._clock())
        settings = context.private / f"{name}.json"
        try:
            write_private(settings, host_settings(context.config))
            folder = self._folders[host] = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=context.private))
            environment = {**os.environ, "TMPDIR": str(folder)}
            command = ChildCommand(name, host_command(context.config, settings), environment)
            await self._hosts[host].start([command])
        except OSError as error:
            self._ended(host, f"environment host cannot be started: {error_text(error)}", NO_START_S)
            return False
        return True

    def received(self, one: Supervised, process: int, message: Any) -> None:
        host, now = self._hosts.index(one), self._clock()
        self._announce(host)
        if isinstance(message, HostReady):
            self._busy_s[host], self._declared_s[host] = max(self._first_s, message.busy_s), message.busy_s
            for chat in message.chats:
                if chat not in self._chats:
                    self._chats.add(chat)
                    self._context.log("chat_choice", **structs.asdict(chat))
        elif isinstance(message, EpisodeStepped):
            self._busy_s[host] = self._declared_s[host]
        # Only signs of life come at a fixed pace; an answer is one too, but its time is not measured.
        if isinstance(message, HostReady | HostHeartbeat):
            self._deadlines.end(host, now)
        self._deadlines.begin(LIFE, host, now, self._busy_s[host])
        self._listener.on_host(host, message)

    def exited(self, one: Supervised, child: Child, reason: str) -> None:
        if not self._stopping:
            self._ended(self._hosts.index(one), reason, RESTART_S)

    def _ended(self, host: int, reason: str, after_s: float) -> None:
        self._deadlines.drop(host)
        self._lost[host] = reason
        self._context.log("host_lost", host=host, reason=reason)
        if (folder := self._folders.pop(host, None)) is not None:
            self._task(_remove(folder))
        supervised = self._hosts[host]
        supervised.starts = 0  # its ends count, in a start or not
        if not supervised.ends_too_often(reason, self._clock()):
            self._task(self._restart(host, after_s * supervised.budget.spent))

    async def _restart(self, host: int, after_s: float) -> None:
        await asyncio.sleep(after_s)
        if not self._stopping and await self._start(host):
            self._announce(host)

    def _announce(self, host: int) -> None:
        """Report the end of the host before, so that its episodes are opened in this one before any other message."""
        reason = self._lost.pop(host, None)
        if reason is not None:
            self._listener.on_host_down(host, reason)

    def _task(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _remove(folder: Path) -> None:
    for _ in range(REMOVALS):
        await asyncio.to_thread(rmtree, folder, ignore_errors=True)
        if not folder.exists():
            return
        await asyncio.sleep(REMOVE_S)
