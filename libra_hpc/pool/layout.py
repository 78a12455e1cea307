"""Who is who: component, leaders and peers of every MPI rank.

Ranks follow the order of the heterogeneous job's components, one rank per node: planner, train, hybrid, rollout.  The launcher states the counts in the
environment variable `COMPONENTS_VARIABLE` (``planner:1,train:1,hybrid:1,rollout:1``), because inside a heterogeneous step Slurm does not tell a task its
component.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, cast

import msgspec

from libra_hpc.errors import OperationError

COMPONENTS_VARIABLE = "LIBRA_COMPONENTS"
ORDER = ("planner", "train", "hybrid", "rollout")
PoolComponent = Literal["train", "hybrid", "rollout"]


class Layout(msgspec.Struct, frozen=True):
    """Component of every rank."""

    components: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Parse ``planner:1,train:2,...``; raises `OperationError` when it is malformed or lacks a planner, a trainer or a rollout node."""
        ranks: list[str] = []
        for part in text.split(","):
            name, _, count = part.partition(":")
            if name not in ORDER or not count.isdigit():
                raise OperationError(f"{COMPONENTS_VARIABLE}={text!r} is not of the form 'planner:1,train:1,hybrid:0,rollout:1'.")
            ranks += [name] * int(count)
        for needed in ("planner", "train", "rollout"):
            if needed not in ranks:
                raise OperationError(f"{COMPONENTS_VARIABLE}={text!r} has no {needed} node.")
        if ranks[0] != "planner":
            raise OperationError(f"{COMPONENTS_VARIABLE}={text!r}: the planner must come first, it is rank 0.")
        return cls(tuple(ranks))

    @property
    def train_leader(self) -> int:
        """Lowest rank of component ``train``."""
        return self.components.index("train")

    @property
    def rollout_leader(self) -> int:
        """Lowest rank of component ``rollout``."""
        return self.components.index("rollout")

    def engine_node(self, rank: int) -> int:
        """Position of a hybrid or rollout rank among all of them, from 0: the index of its entry in lists of the run file."""
        return sum(name in ("hybrid", "rollout") for name in self.components[:rank])

    def pool(self) -> list[tuple[int, PoolComponent]]:
        """Every rank that runs engines, with its component."""
        return [(rank, cast(PoolComponent, name)) for rank, name in enumerate(self.components) if name != "planner"]


def check_world(size: int, layout: Layout, environment: Mapping[str, str]) -> None:
    """Raise `OperationError` when MPI and the launcher disagree on the number of ranks.

    A wrong pairing of MPI library and `srun --mpi` plugin is otherwise silent: every task becomes a world of size one and exits with 0.
    """
    expected = len(layout.components)
    tasks = environment.get("SLURM_STEP_NUM_TASKS") or environment.get("SLURM_NTASKS") or ""
    if size == expected:
        return
    hint = "srun started every rank as its own MPI world: " if size == 1 else ""
    plugin = "the installed MPI does not speak the chosen srun plugin; set slurm.mpi to one of `srun --mpi=list` (PyPI mpich needs pmi2, Open MPI pmix)"
    launched = f", the step has {tasks} tasks" if tasks else ""
    raise OperationError(f"MPI world has {size} ranks but the job has {expected} nodes{launched}: {hint}{plugin}.")
