"""Component, leaders and peers of every MPI rank.

Ranks follow the order of the heterogeneous job's components, one rank per node: planner, train, hybrid, rollout,
env. Inside a heterogeneous step Slurm gives a task no component, so the run's configuration does, also after a
repartition.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, cast

import msgspec

from libra_hpc.config.node_groups import rank_components
from libra_hpc.config.run import RunConfig
from libra_hpc.errors import OperationError

PoolComponent = Literal["train", "hybrid", "rollout", "env"]


class RankLayout(msgspec.Struct, frozen=True):
    components: tuple[str, ...]
    nodes_per_replica: int = 1
    """Hybrid nodes that train as one world."""
    core_rolls_out: bool = False

    @classmethod
    def of(cls, config: RunConfig) -> RankLayout:
        """The layout a configuration asks for; a checked one has the planner first, a trainer and a rollout node."""
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
        return self.components.index("rollout")

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


def check_world(size: int, layout: RankLayout, environment: Mapping[str, str]) -> None:
    """Raise `OperationError` when MPI and the launcher disagree on the number of ranks.

    A wrong pairing of MPI library and `srun --mpi` plugin is otherwise silent: every task is a world of size one and
    exits with 0.
    """
    expected = len(layout.components)
    tasks = environment.get("SLURM_STEP_NUM_TASKS") or environment.get("SLURM_NTASKS") or ""
    if size == expected:
        return
    hint = "srun started every rank as its own MPI world: " if size == 1 else ""
    plugin = (
        "the installed MPI does not speak the chosen srun plugin; set slurm.mpi to one of `srun --mpi=list` (PyPI mpich"
        " needs pmi2, Open MPI pmix)"
    )
    launched = f", the step has {tasks} tasks" if tasks else ""
    raise OperationError(f"MPI world has {size} ranks but the job has {expected} nodes{launched}: {hint}{plugin}.")
