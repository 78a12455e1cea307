"""A plan for a run: which nodes train and roll out, in which layouts, and its predicted seconds."""

from __future__ import annotations

import msgspec

from libra_hpc.models.devices import Device
from libra_hpc.models.host_memory import HostRoom
from libra_hpc.models.update_time import NO_UPDATE, UpdateTime

from .rollout_layout import RolloutLayout
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
    runs: bool = True
    """Whether this version runs it."""


class RunPlan(msgspec.Struct, frozen=True):
    """A complete plan and its predicted cost."""

    pool: int
    """Index of the pool that trains."""
    nodes: int
    """Nodes of its core, which always train; all other nodes roll out."""
    train: TrainChoice
    rollout: RolloutLayout
    hybrid: int
    """Hybrid nodes among those that roll out."""
    rollout_s: float = 0.0
    """Rollout seconds of one global batch: simulated, or of the cost models."""
    seconds: float = 0.0
    """Seconds of one global batch, with these rollout seconds."""
    model_s: float = 0.0
    """Seconds of one global batch, by the cost models."""
    tokens_s: float = 0.0
    """Tokens of finished trajectories, trained on, per second."""
    hidden_s: float = 0.0
    """Training seconds beside rollout, because groups are trained as they are complete."""
    simulated: int = 0
    """Batches that were simulated."""
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

    @property
    def runs(self) -> bool:
        """Whether this version runs it."""
        return self.in_turn is None or self.in_turn.runs

    def rolls(self, have: int) -> int:
        """Nodes that roll out, of so many in all."""
        return have if self.in_turn and self.in_turn.core_rolls else have - self.nodes

    @property
    def mixed(self) -> bool:
        """Whether a pool has engines of several TP degrees."""
        pools = [s.pool for s in self.rollout.segments]
        return len(set(pools)) < len(pools)


class PlanResult(msgspec.Struct, frozen=True):
    """Plans from best to worst, one for each evaluated number of training nodes."""

    plans: tuple[RunPlan, ...]
    bound: float
    """Seconds that no plan can beat."""
    excluded: tuple[Excluded, ...]
    """Impossible choices for the best plan's nodes, nearest to possible first; training comes before rollout."""
    alone: tuple[tuple[int, int, float], ...]
    """Rollout of the best plan's nodes with one class only: (pool, TP, seconds)."""
    spare: tuple[int, ...]
    """TP degree of each pool for nodes without a share of a plan's lengths; 0: none holds the longest."""
    straggler: float
    """Seconds of the longest trajectories alone; more rollout nodes do not shorten them."""
    sources: tuple[str, ...]
    """Where step times come from."""
    study: RunPlan | None = None
    """The best plan in turn, where this version does not run it."""

    @property
    def gap(self) -> float:
        """Share by which the best plan can be off the optimum."""
        return max(0.0, 1.0 - self.bound / self.plans[0].seconds)
