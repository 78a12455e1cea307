"""A plan for a run: which nodes train and roll out, in which layouts, and its predicted seconds."""

from __future__ import annotations

import msgspec

from libra_hpc.models.devices import Device
from libra_hpc.models.host_memory import HostRoom
from libra_hpc.models.update_time import NO_UPDATE, UpdateTime

from .train_layout import Excluded, TrainChoice


class DevicePool(msgspec.Struct, frozen=True):
    """Equal nodes, such as those of one component of a heterogeneous job."""

    device: Device
    nodes: int
    node_devices: int
    room: HostRoom = HostRoom()

    @property
    def devices(self) -> int:
        return self.nodes * self.node_devices


class InTurn(msgspec.Struct, frozen=True):
    """Nodes that serve both stages of every step: first rollout, then training."""

    switch_s: float
    """Seconds of a pair of switches, to training and back with the new weights."""
    core_rolls: bool = False
    """Whether nodes of the core roll out too; without, hybrid nodes alone serve both stages."""


class PoolEngines(msgspec.Struct, frozen=True):
    """Equal engines on the devices of a pool."""

    pool: int
    tp: int
    replicas: int

    @property
    def devices(self) -> int:
        return self.tp * self.replicas


class RunPlan(msgspec.Struct, frozen=True):
    """A complete plan and its predicted cost."""

    pool: int
    """Index of the pool that trains."""
    nodes: int
    """Nodes of its core, which always train; all other nodes roll out."""
    train: TrainChoice
    engines: tuple[PoolEngines, ...]
    """One entry for each pool that rolls out."""
    hybrid: int
    """Hybrid nodes among those that roll out."""
    rollout_s: float = 0.0
    """Until a batch is complete; of overlapping batches, in which engines compute."""
    seconds: float = 0.0
    """Seconds of one global batch."""
    tokens_s: float = 0.0
    """Tokens of finished trajectories, trained on, per second."""
    hidden_s: float = 0.0
    """Training seconds beside rollout, because groups are trained as they are complete."""
    played: int = 0
    """Batches that count."""
    snapshots: bool = True
    """Whether they fit in host memory."""
    update: UpdateTime = NO_UPDATE
    """Update time of its training processes, and of an engine of one GPU."""
    in_turn: InTurn | None = None
    """None: each node serves one stage."""

    @property
    def trains(self) -> int:
        """Nodes that train a step."""
        return self.nodes + (self.hybrid if self.in_turn else 0)

    def rolls(self, have: int) -> int:
        """Nodes that roll out, of so many in all."""
        return have if self.in_turn and self.in_turn.core_rolls else have - self.nodes

    @property
    def least_tp(self) -> int:
        """The degree of the engines that have new weights last."""
        return min(one.tp for one in self.engines)


class PlanResult(msgspec.Struct, frozen=True):
    """Plans from best to worst."""

    plans: tuple[RunPlan, ...]
    excluded: tuple[Excluded, ...]
    """Impossible choices for the best plan's nodes, nearest to possible first; training comes before rollout."""
    straggler: float
    """Seconds of the longest trajectory alone; more rollout nodes do not shorten it."""
    sources: tuple[str, ...]
    """Where step times come from."""
