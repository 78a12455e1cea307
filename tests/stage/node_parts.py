"""The surroundings of one part of a node: its context, and what it has sent."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

from libra_hpc.agent.supervised import EngineNode
from libra_hpc.config.run import RunConfig
from libra_hpc.facts.rundir import RunDir
from libra_hpc.mesh.agent_context import AgentContext, RankLayout
from libra_hpc.protocol.agents import Log
from libra_hpc.protocol.engine_state import ObservedEngine
from libra_hpc.protocol.layout import Layout, ResumePoint
from libra_hpc.protocol.layout_changes import LayoutHistory

FIRST_START = ResumePoint(0, "", 0, ())


class Outbox:
    """Messages of a part, by the ranks that they are for."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, Any]] = []
        self.layouts = LayoutHistory()

    def publish(self, layout: Layout, ranks: Iterable[int]) -> None:
        """As `Publisher`, at once and whole."""
        self.layouts.put(layout)
        self.sent += [(rank, self.layouts.layout) for rank in ranks]

    def send(self, rank: int, message: Any) -> None:
        self.sent.append((rank, message))

    def of(self, *kinds: type) -> list[Any]:
        return [message for _, message in self.sent if isinstance(message, kinds)]

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [log.fields for log in self.of(Log) if log.kind == kind]

    def context_of(
        self,
        folder: Path,
        rank: int,
        *components: str,
        config: RunConfig | None = None,
        start: ResumePoint = FIRST_START,
        core_rolls_out: bool = False,
        **fields: Any,
    ) -> AgentContext:
        """That of a node of a run with these components, by default one of each; all folders are ``folder``."""
        layout = RankLayout(components or ("planner", "train", "rollout"), core_rolls_out=core_rolls_out)
        folders = {"run": RunDir(folder), "private": folder, "shared_memory": folder}
        publisher = Mock(publish=self.publish, summary="by MPI")
        made = {"attempt": 1, "send": self.send, "resume_point": start, "publisher": publisher, **folders, **fields}
        return AgentContext(rank, layout, config or RunConfig(), **made)


class Watched(Outbox):
    """The surroundings of what a node has of one kind, and the states that these took."""

    node: EngineNode[Any]

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, ObservedEngine]] = []

    def changed(self) -> None:
        asyncio.get_running_loop().call_soon(self._note)

    def _note(self) -> None:
        known = {name: engine.state for name, engine in self.seen}
        self.seen += [(name, one) for name, one in self.node.observed.items() if one.state != known.get(name)]

    def states(self, *names: str) -> list[ObservedEngine]:
        return [engine for _, engine in self.seen if engine.state in names]
