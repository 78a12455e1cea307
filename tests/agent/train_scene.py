"""A training node around simulated trainer processes, which a test tells what to do and asks what it reported."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

from libra_hpc.agent.node_carrier import NodeCarrier
from libra_hpc.agent.train_node import TrainNode
from libra_hpc.config.load import validate
from libra_hpc.facts.rundir import RunDir
from libra_hpc.protocol.agents import FromReplica
from tests.agent.weights_here import WrittenImage
from tests.stage.node_parts import Watched
from tests.stage.waiting import until


class Scene(Watched):
    """A training node of a dry run, with ``tp`` processes: the whole core unless told otherwise."""

    def __init__(
        self, folder: Path, tp: int = 1, rank: int = 1, components: tuple[str, ...] = ("train", "hybrid", "rollout")
    ) -> None:
        config = validate(
            {
                "run": {"engine": "simulated"},
                "planner": {"model": "qwen3-8b", "device": "a800"},
                "simulated": {"presets": ["math"], "speedup": 1000.0, "start_s": 0.0},
                "components": {
                    name: {"gpus": 8, "nodes": components.count(name)} for name in ("train", "hybrid", "rollout")
                },
                "train": {"tp": tp, "processes": tp},
                "deadlines": {"floor_s": 4.0, "first_s": 60.0},
            }
        )
        super().__init__()
        self.shm = folder / "shm"
        self.shm.mkdir(parents=True)
        self.run = RunDir(folder / "run")
        self.run.path.mkdir(exist_ok=True)
        folders = {"run": self.run, "shared_memory": self.shm}
        context = self.context_of(folder, rank, "planner", *components, config=config, changed=self.changed, **folders)
        self.weights = WrittenImage(self.shm)
        self.node = TrainNode(context, cast(NodeCarrier, self.weights))

    def answers(self, kind: type) -> list[Any]:
        return [message.message for message in self.of(FromReplica) if isinstance(message.message, kind)]

    async def ready(self) -> int:
        """Start the replica; returns the process id of its first process."""
        before = len(self.states("ready"))
        await self.node.start()
        await until(lambda: len(self.states("ready")) > before)
        return next(iter(self.node.pids.values()))

    async def __aenter__(self) -> Scene:
        self._watch = asyncio.create_task(self.node.watch())
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self.node.stop()
        self._watch.cancel()
