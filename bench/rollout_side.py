"""The rollout side of a run inside one process: production agent half and leader, with a mesh that needs no MPI."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from libra_hpc.agent.hosting.rollout_service import RolloutService
from libra_hpc.agent.node_carrier import NodeCarrier
from libra_hpc.agent.rollout_node import RolloutNode
from libra_hpc.config.run import RunConfig
from libra_hpc.facts.rundir import RunDir
from libra_hpc.mesh.agent_context import AgentContext
from libra_hpc.mesh.rank_layout import RankLayout
from libra_hpc.process.agent_folders import make_folders
from libra_hpc.protocol import agents as wire
from libra_hpc.protocol.layout import ResumePoint

LAYOUT = RankLayout(("planner", "train", "rollout"))
PLANNER, TRAINER, NODE = range(3)
Folders = tuple[Any, Any]


class LocalMesh:
    """Mesh messages inside one process, delivered one event-loop pass later; the rest is production code."""

    def __init__(self) -> None:
        self.handlers: dict[int, Callable[[Any], None]] = {}

    def send(self, rank: int, message: Any) -> None:
        """Deliver to the handler of ``rank``; dropped without one."""
        handler = self.handlers.get(rank)
        if handler is not None:
            asyncio.get_running_loop().call_soon(handler, message)

    def context(self, rank: int, config: RunConfig, run: RunDir, folders: Folders | None = None) -> AgentContext:
        private, shared = folders or make_folders()
        return AgentContext(
            rank, LAYOUT, config, run, 1, self.send, ResumePoint(0, "", 0, ()), private=private, shared_memory=shared
        )


class RolloutSide:
    """The agent half with its engines; the leader is set while a run is played."""

    def __init__(self, config: RunConfig, run: RunDir) -> None:
        self.mesh, self.folders = LocalMesh(), make_folders()
        self.context = self.mesh.context(NODE, config, run, self.folders)
        self.node = RolloutNode(self.context, NodeCarrier(self.context, lambda: None))
        self.service: RolloutService | None = None
        self.batches: list[wire.Batch] = []
        self.mesh.handlers = {TRAINER: self._trainer, NODE: self._agent}

    def on_turns(self, message: wire.Turns) -> None:
        self.node.on_turns(message)

    def on_message(self, message: Any) -> None:
        if self.service is not None:
            self.service.on_message(message)

    def _trainer(self, message: Any) -> None:
        if isinstance(message, wire.WeightsWanted):
            self.mesh.send(NODE, wire.WeightsCurrent(message.have))
        elif isinstance(message, wire.Batch):
            self.batches.append(message)

    def _agent(self, message: Any) -> None:
        match message:
            case wire.Turns():
                self.on_turns(message)
            case wire.WeightsCurrent():
                self.node.on_current(message)
            case _:
                self.on_message(message)
