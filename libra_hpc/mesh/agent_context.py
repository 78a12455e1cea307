"""What every part of a node agent shares: identity, configuration, folders, sending and logging."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from libra_hpc.config.run import RunConfig
from libra_hpc.facts.rundir import RunDir
from libra_hpc.gate.gated_steps import GateConfig
from libra_hpc.process.lease import Fence
from libra_hpc.protocol.agents import Log, MeshMessage
from libra_hpc.protocol.engine_state import EngineState, LenderKind
from libra_hpc.protocol.layout import Layout, ResumePoint

from .layout_publisher import Publisher
from .rank_layout import RankLayout

Send = Callable[[int, MeshMessage], None]


@dataclass
class AgentContext:
    rank: int
    layout: RankLayout
    config: RunConfig
    run: RunDir
    attempt: int
    send: Send
    resume_point: ResumePoint
    private: Path
    """Mode 0700, for settings of engines."""
    shared_memory: Path
    """Mode 0700, in /dev/shm where there is one: weights."""
    receivers: tuple[int, ...] = field(default=())
    """Ranks that get new weights, from the newest `Layout`."""
    good_step: int = -1
    """Newest step that is known to be good; from the same one."""
    secret: bytes = b""
    """Secret of this start; who connects to this node proves that it has it."""
    addresses: tuple[str, ...] = ("127.0.0.1",)
    """Addresses of this node, in the order in which others try them."""
    kept: Path | None = None
    """Folder in memory that outlives the agent when all ranks restart: snapshots. None: there is none."""
    guest_engines: tuple[int, int] = (1, 0)
    """(TP, engines) of this node, if it is a guest."""
    lender: tuple[str, LenderKind] = ("", "idle")
    """Whose they are."""
    pull_mb_s: float = 0.0
    """Most MB/s of weights that this node gets from others; 0: no limit."""
    gate: GateConfig | None = None
    """Gate of a guest's engines."""
    publisher: Publisher | None = None
    """Rank 0's; without one Layouts go by stream."""
    ended: Mapping[int, str] = field(default_factory=dict)
    """See `OwnerLink.lost`."""
    fence: Fence = field(default_factory=lambda: Fence(Path()))
    """Whether the run is still that of this start's owner."""

    @property
    def start_name(self) -> str:
        """Name of this start of the ranks, unlike that of any other of the run."""
        return f"attempt-{self.attempt}-{self.resume_point.pid}"

    @property
    def snapshots(self) -> Path:
        return self.kept or self.shared_memory / "snapshots"

    @property
    def has_parts(self) -> bool:
        """Whether this node has parts of snapshots, for itself or for nodes that restart from them."""
        return self.rank in self.layout.core or self.rank in self.resume_point.restore.values()

    @property
    def component(self) -> str:
        return self.layout.component(self.rank)

    @property
    def engines(self) -> tuple[int, int]:
        """(TP, engines) of this node, for rollout."""
        if self.component == "guest":
            return self.guest_engines
        serves = self.layout.rolls_out(self.rank)
        return self.config.rollout.on_node(self.layout.engine_node(self.rank)) if serves else (1, 0)

    @property
    def logs(self) -> Path:
        return self.run.logs(self.attempt)

    def log(self, kind: str, **fields: Any) -> None:
        self.send(0, Log(kind, time.time(), fields))

    @property
    def orders(self) -> str:
        """See `Status.orders`."""
        return self.publisher.summary if self.publisher is not None else ""

    def publish(self, layout: Layout, ranks: Collection[int]) -> None:
        """Send a Layout to these nodes."""
        if self.publisher is not None:
            self.publisher.publish(layout, ranks)
        else:
            for rank in ranks:
                self.send(rank, layout)

    def report(self, state: EngineState, *ranks: int, **fields: Any) -> None:
        """Send an engine's state to these ranks, and log it as event ``engine_ready`` or ``engine_lost``."""
        outcome = {"reason": state.reason} if state.reason else {"version": state.version, "seconds": state.seconds}
        self.log(f"engine_{state.state}", rank=state.rank, engine=state.engine, **outcome, **fields)
        for rank in ranks:
            self.send(rank, state)

    def send_to_rollout_leader(self, message: MeshMessage) -> None:
        self.send(self.layout.rollout_leader, message)
