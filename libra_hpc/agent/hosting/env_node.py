"""The environment hosts of an environment node: what the rollout leader sends to them, and gets of them, by the mesh.

- All hosts are ready -> rank 0 knows; a host restarts -> its episodes are opened elsewhere, as on the leader's node.
- A host ends too often -> this node is given up, and no other one: it may begin as a new one, or is quarantined.
- The node was declared lost, and comes back -> its hosts end with all boxes, and others start.
"""

from __future__ import annotations

import time
from typing import Any

from libra_hpc.agent.supervised import Supervised
from libra_hpc.mesh.agent_context import AgentContext
from libra_hpc.protocol import agents as wire
from libra_hpc.protocol.engine_state import Doing, EngineState

from .hosts import Hosts


class EnvHost(Supervised):
    def restart_all(self, reason: str, defect: bool = False) -> None:
        """The run goes on without this node."""
        self._context.send(0, EngineState(self._context.rank, "env", "lost", reason=reason))


class EnvNode(Hosts):
    engine = EnvHost

    def __init__(self, context: AgentContext) -> None:
        super().__init__(context, self)
        self._announced = False
        """Whether rank 0 knows that all are ready."""

    async def start(self) -> None:
        self._stopping, self._announced, self._ordered_at = False, False, time.monotonic()
        await super().start()

    def on_host(self, host: int, message: Any) -> None:
        if isinstance(message, Doing):
            return
        rank = self._context.rank
        self._context.send_to_rollout_leader(wire.FromEnvHost(rank, host, message))
        if not self._announced and all(one.state == "ready" for one in self._hosts):
            self._announced = True
            seconds = time.monotonic() - self._ordered_at
            self._context.send(0, EngineState(rank, "env", "ready", seconds=seconds))

    def on_host_down(self, host: int, reason: str) -> None:
        self._context.send_to_rollout_leader(wire.EnvHostLost(self._context.rank, host, reason))
