"""Component, leaders and peers of every MPI rank, and what all parts of its agent share: files, folders, sending.

Ranks follow the order of the heterogeneous job's components, one rank per node: planner, train, hybrid, rollout,
env. Inside a heterogeneous step Slurm gives a task no component, so the run's configuration does, also after a
repartition.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

import msgspec

from libra_hpc.config.node_groups import STAGES, rank_components
from libra_hpc.config.run import RunConfig
from libra_hpc.facts.rundir import RunDir
from libra_hpc.gate.gated_steps import GateConfig
from libra_hpc.process.lease import Fence
from libra_hpc.protocol.agents import Log, MeshMessage
from libra_hpc.protocol.engine_state import LenderKind
from libra_hpc.protocol.layout import ResumePoint

from .layout_publisher import Publisher

PoolComponent = Literal["train", "hybrid", "rollout", "env"]


class RankLayout(msgspec.Struct, frozen=True):
    components: tuple[str, ...]
    nodes_per_replica: int = 1
    """Hybrid nodes that train as one world."""
    core_rolls_out: bool = False

    @classmethod
    def of(cls, config: RunConfig) -> RankLayout:
        """The layout a configuration asks for; a checked one has the planner first, and a trainer."""
        parts = config.components
        return cls(tuple(rank_components(config)), parts.hybrid.nodes_per_replica, parts.train.roll_out)

    def component(self, rank: int) -> str:
        """``guest`` of an agent that joined later."""
        return self.components[rank] if rank < len(self.components) else "guest"

    @property
    def core(self) -> tuple[int, ...]:
        """Nodes that train together as one world and own the optimizer's state."""
        return tuple(rank for rank, name in enumerate(self.components) if name == "train")

    @property
    def train_leader(self) -> int:
        """Without trainers, in an evaluation, rank 0 answers in its place."""
        return self.core[0] if self.core else 0

    @property
    def rollout_leader(self) -> int:
        """The first node of those with engines that stay, else of those that come back first."""
        return self.components.index(next(name for name in reversed(STAGES) if name in self.components))

    @property
    def listeners(self) -> frozenset[int]:
        """Nodes that get what others observe."""
        return frozenset((0, self.train_leader, self.rollout_leader))

    @property
    def vital(self) -> tuple[int, ...]:
        """Nodes without which the others cannot go on: the core and the rollout leader."""
        return (*self.core, self.rollout_leader)

    def unit(self, rank: int) -> tuple[int, ...]:
        """Nodes that train as one world and move together, in rank order; a node that does not move is alone."""
        if self.core_rolls_out and rank in self.core:
            return self.core
        hybrids = [other for other, name in enumerate(self.components) if name == "hybrid"]
        if rank not in hybrids:
            return (rank,)
        each = self.nodes_per_replica
        first = hybrids.index(rank) // each * each
        return tuple(hybrids[first : first + each])

    def engine_node(self, rank: int) -> int:
        """Index of a hybrid or rollout rank among all of them, from 0, as in lists of the run file."""
        return sum(name in ("hybrid", "rollout") for name in self.components[:rank])

    def rolls_out(self, rank: int) -> bool:
        """Whether the node has rollout engines, at least at times."""
        return self.components[rank] in ("hybrid", "rollout") or (self.core_rolls_out and rank in self.core)

    def pool(self) -> list[tuple[int, PoolComponent]]:
        return [(rank, cast(PoolComponent, name)) for rank, name in enumerate(self.components) if name != "planner"]


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
    changed: Callable[[], None] = lambda: None
    """Called where an engine has changed: the next heartbeat has it, at once."""
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
    """Rank 0's."""
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
        """How Layouts reach the nodes, as in `Status.orders`."""
        return self.publisher.summary if self.publisher is not None else ""

    def send_to_rollout_leader(self, message: MeshMessage) -> None:
        self.send(self.layout.rollout_leader, message)
