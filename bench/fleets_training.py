"""Both stages of the steady rows of `bench.fleets`: which nodes train, for how long, and what the planner chooses.

- Training: seconds of the best layout by the planner's cost model, which knows the lengths of the work; those of a
  batch are in proportion to its tokens.
- A split: so many nodes train, the others roll out; engines get new weights as `update_time` says.  With eta = 0
  groups are trained as they are complete.
- In turn: all nodes roll out, then all train, with a pair of switches a batch.  Unfinished turns are
  computed again, or KV caches are kept: then a pair includes their copy to host memory and back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from msgspec.structs import replace

from bench.fleets_rows import MAX_CONTEXT, NODE, ROWS, Fleet, Part, Setting, work
from libra_hpc.errors import OperationError
from libra_hpc.models.devices import device
from libra_hpc.models.shapes import model_shape
from libra_hpc.models.step_times.lookup import lookup
from libra_hpc.models.train_seconds import TrainCost, portion, work_of
from libra_hpc.models.update_time import update_time
from libra_hpc.planning.best_plan import best_plans
from libra_hpc.planning.request import DevicePool, InTurn, PlanRequest
from libra_hpc.planning.train_layout import TrainSearch, TrainSpace
from libra_hpc.protocol.trace import TrajectoryRecord
from libra_hpc.simulator.settings import SimulationSettings, Training
from libra_hpc.traces.run_work import Work, WorkPart

SWITCH_S = 80.0
"""A pair of switches, assumed: verl moves weights, optimizer and caches of both stages."""


class Roles(NamedTuple):
    """What the nodes of a steady row do."""

    train: int = 0
    """Nodes that train; 0: all, in turn with rollout."""
    keep_kv: bool = False
    """In turn: caches are kept."""
    switch_s: float = SWITCH_S
    """In turn: a pair of switches."""
    core: int = 0
    """In turn: nodes of the core; 0: all."""
    beside: int = 0
    """In turn: hybrid nodes that train beside the core."""

    @property
    def words(self) -> str:
        if self.train:
            return f"{self.train * NODE} train"
        other = "" if self.switch_s == SWITCH_S else f" {self.switch_s:.0f} s"
        own = f", {(self.core + self.beside) * NODE} train" if self.core else ""
        return f"in turn{other}{own}{', KV kept' if self.keep_kv else ''}"


class Trained(NamedTuple):
    seconds: float
    """Of a mean batch."""
    tokens: float
    """Of that batch."""
    portion: int
    """Groups that are trained together as soon as they are complete; 0: whole batches."""


class Planned(NamedTuple):
    fleet: Fleet
    roles: Roles
    expected_s: float
    """Of a batch, as `plan` prints it."""


def lengths_of(records: Sequence[TrajectoryRecord]) -> list[tuple[int, int]]:
    """Tokens and generated tokens of each."""
    return [(one.context, one.generated) for one in records]


@lru_cache(maxsize=64)
def train_seconds(name: str, seed: int, roles: Roles) -> Trained:
    """Of the best layout; raises `OperationError` when none fits."""
    row = ROWS[name]
    batch = work_of(lengths_of(work(name, seed)[1]), row.trajectories)
    cost = TrainCost(model_shape(row.model), device(row.pools[0][0]), NODE, batch)
    core = roles.train or roles.core or nodes_of(row)
    choice = TrainSearch(cost, NODE).best(core * NODE, elastic=int(roles.beside > 0), worlds=roles.beside)
    if choice is None:
        raise OperationError(f"No training layout fits on {core} nodes.")
    groups, length = row.trajectories // row.group, math.ceil(portion(choice.layout, batch.mean) / row.group)
    streamed = not row.eta and roles.train and 2 * length <= groups
    return Trained(choice.time.total, batch.tokens, length if streamed else 0)


def training_of(name: str, seed: int, roles: Roles) -> Training:
    usual = train_seconds(name, seed, roles)
    return lambda tokens, nodes: usual.seconds * tokens / usual.tokens


def nodes_of(row: Setting) -> int:
    return row.pools[0][1] // NODE


def settings_of(row: Setting, fleet: Fleet, roles: Roles, portion: int = 0) -> SimulationSettings:
    if not row.batches:
        return SimulationSettings(max_model_len=MAX_CONTEXT)
    shape, gpu = model_shape(row.model), device(row.pools[0][0])
    settings = SimulationSettings(max_model_len=MAX_CONTEXT, batch_groups=row.trajectories // row.group, eta=row.eta)
    if roles.train:
        return replace(settings, update=update_time(shape, gpu).by(roles.train * NODE), portion_groups=portion)
    copy_s = 0.0
    if roles.keep_kv:
        held = [lookup(gpu, shape, part.tp).kv_capacity * shape.kv_bytes_per_device(part.tp) for part in fleet]
        copy_s = 2.0 * max(held) / gpu.host_bytes_s
    return replace(settings, switch_s=roles.switch_s + copy_s, keep_kv=roles.keep_kv)


def planned_split(name: str, seeds: Sequence[int], policy: str) -> Planned:
    """The choice of `libra-hpc plan` for the lengths of the work of ``seeds``, among every way in turn."""
    row = ROWS[name]
    seen = [replace(one, prompt_id=f"{seed}/{one.prompt_id}") for seed in seeds for one in work(name, seed)[1]]
    asked = PlanRequest(
        shape=model_shape(row.model),
        pools=(DevicePool(device(row.pools[0][0]), nodes_of(row), NODE),),
        batch=work_of(lengths_of(seen), row.trajectories),
        settings=SimulationSettings(max_model_len=MAX_CONTEXT, batch_groups=row.trajectories // row.group, eta=row.eta),
        space=TrainSpace(),
        work=Work((WorkPart(tuple(seen)),), row.group, source="the work of the choosing seeds"),
        policy=policy,
        in_turn=tuple(InTurn(SWITCH_S, core) for core in (False, True)),
    )
    best = min(best_plans(asked).plans, key=lambda plan: plan.seconds)
    roles = Roles(core=best.nodes, beside=best.hybrid) if best.in_turn else Roles(best.nodes)
    fleet = tuple(Part(one.pool, one.tp, one.replicas) for one in best.engines)
    return Planned(fleet, roles, best.seconds)
