"""The environment host processes of a node: started, watched, ended when they hang, restarted.

- A host is late or stalled -> as `Supervised`.
- Until a host has answered a step, it may be silent for the first deadline: a task may load its data late.
- After that the limit is the task's own longest step or tool (`Doing.silence_s`) where that is longer than measured.
- A host ended -> another follows after `RESTART_S` for every end in the window (`NO_START_S` where it did not start).
- Temporary files of a host and its tools are in a folder of that process, which is removed when it ended.
- An environment node (`EnvNode`) -> its hosts' messages go by the mesh. One that ends too often gives up this node.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from pathlib import Path
from shutil import rmtree
from typing import Any, Protocol

import msgspec
from msgspec import structs

from libra_hpc.agent.child_start import child_command
from libra_hpc.agent.supervised import NO_START_S, ChildCommand, EngineNode, Supervised
from libra_hpc.errors import error_text
from libra_hpc.host.settings import write_private
from libra_hpc.mesh.agent_context import AgentContext
from libra_hpc.process.child import Child, spawn
from libra_hpc.protocol import agents as wire
from libra_hpc.protocol.engine_state import Doing
from libra_hpc.protocol.env import ChatChoice, HostLost, HostReady, ToHost, from_host, to_host

RESTART_S = 0.5
"""After one end in the window; two ends wait twice as long."""
REMOVE_S, REMOVALS = 1.0, 8
"""Seconds between two attempts to remove the folder of an ended host, and how many: what its tools left behind lives
until the agent's next look (`libra_hpc.agent.node.LIVE_S`), and may write until then.
"""


class HostListener(Protocol):
    """The rollout leader, or what sends to it."""

    def on_host(self, host: int, message: Any) -> None:
        """A host's message, or that it was lost."""


class Hosts(EngineNode[Supervised]):
    engine, kind, outbound, inbound = Supervised, "env", to_host, from_host

    def __init__(self, context: AgentContext, listener: HostListener) -> None:
        # On an environment node beside those of other ranks in the folder of logs.
        prefix = f"e{context.rank}." if context.component == "env" else "host"
        self._children = [f"{prefix}{host}" for host in range(context.config.task.hosts)]
        """Names of processes."""
        titles = [f"environment host {host}" for host in range(context.config.task.hosts)]
        super().__init__(context, self._children if context.component == "env" else titles, "{}")
        self._listener, self._hosts = listener, list(self._engines.values())
        self._lost: dict[int, str] = {}
        """Hosts that ended and whose next one is not announced, with the reason."""
        self._folders: dict[int, Path] = {}
        self._chats: set[ChatChoice] = set()
        """Chat formats that have an event already."""

    async def start(self, starts: int = 0, world: int = 0) -> None:
        for host in range(len(self._hosts)):
            await self._start(host)

    async def reset(self) -> None:
        """End all unreported, with all that they had."""
        self._stopping = True
        self._lost.clear()
        await asyncio.gather(*(host.reset() for host in self._hosts))
        await asyncio.gather(*(_remove(folder) for folder in self._folders.values()))

    def send(self, host: int, message: ToHost) -> None:
        """Send one message; to a host that is gone it is dropped."""
        if host not in self._lost:
            self._hosts[host].send(message)

    async def _start(self, host: int) -> bool:
        """False when it could not be started; another attempt follows."""
        context, name = self._context, self._children[host]
        settings = context.private / f"{name}.json"
        try:
            write_private(settings, msgspec.json.encode(context.config))
            folder = self._folders[host] = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=context.private))
            environment = {**os.environ, "TMPDIR": str(folder)}
            self._hosts[host].state = "starting"
            command = ChildCommand(name, child_command(context.config, "host", settings), environment)
            await self._hosts[host].start([command])
        except OSError as error:
            self._ended(host, f"environment host cannot be started: {error_text(error)}", NO_START_S)
            return False
        return True

    def received(self, one: Supervised, process: int, message: Any) -> None:
        host = self._hosts.index(one)
        self._announce(host)
        if isinstance(message, HostReady):
            one.state = "ready"
            for chat in message.chats:
                if chat not in self._chats:
                    self._chats.add(chat)
                    self._context.log("chat_choice", **structs.asdict(chat))
        self._listener.on_host(host, message)

    def exited(self, one: Supervised, child: Child, reason: str) -> None:
        if not self._stopping:
            self._ended(self._hosts.index(one), reason, RESTART_S)

    def _ended(self, host: int, reason: str, after_s: float) -> None:
        self._lost[host], self._hosts[host].state = reason, "lost"
        self._context.log("host_lost", rank=self._context.rank, host=host, reason=reason)
        if (folder := self._folders.pop(host, None)) is not None:
            spawn(_remove(folder))
        supervised = self._hosts[host]
        supervised.starts = 0  # its ends count, in a start or not
        if not supervised.ends_too_often(reason, time.monotonic()):
            spawn(self._restart(host, after_s * supervised.budget.spent))

    async def _restart(self, host: int, after_s: float) -> None:
        await asyncio.sleep(after_s)
        if not self._stopping and host in self._lost and await self._start(host):
            self._announce(host)

    def _announce(self, host: int) -> None:
        """Report the end of the host before, so that its episodes are opened in this one before any other message."""
        reason = self._lost.pop(host, None)
        if reason is not None:
            self._listener.on_host(host, HostLost(reason))


async def _remove(folder: Path) -> None:
    for _ in range(REMOVALS):
        await asyncio.to_thread(rmtree, folder, ignore_errors=True)
        if not folder.exists():
            return
        await asyncio.sleep(REMOVE_S)


class EnvHost(Supervised):
    def restart_all(self, reason: str, defect: bool = False) -> None:
        """The run goes on without this node."""
        self.state, self.reason = "closed", reason


class EnvNode(Hosts):
    engine = EnvHost

    def __init__(self, context: AgentContext) -> None:
        super().__init__(context, self)

    async def start(self, starts: int = 0, world: int = 0) -> None:
        self._stopping = False
        await super().start()
        self.acted(starts)

    def on_host(self, host: int, message: Any) -> None:
        if not isinstance(message, Doing):
            self._context.send_to_rollout_leader(wire.FromEnvHost(self._context.rank, host, message))
