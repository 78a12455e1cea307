"""The planner's question, from a run file: model, nodes, batch and lengths; and its answer.

Components that train or roll out, with the same kind and number of GPUs, form one pool. The lengths are those of
`libra_hpc.traces.run_work`, and the answer states their source: the split depends on them most.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from libra_hpc.config.job import Component
from libra_hpc.config.node_groups import stages
from libra_hpc.config.run import RunConfig
from libra_hpc.errors import UserError, invalid
from libra_hpc.models.adapters import with_adapters
from libra_hpc.models.devices import Device, device
from libra_hpc.models.host_memory import HostRoom, HostUse, node_work
from libra_hpc.models.memory import RECOMPUTE
from libra_hpc.models.shapes import DTYPE_BYTES, ModelShape, model_shape, reference_shape
from libra_hpc.models.train_seconds import TrainWork, work_of
from libra_hpc.models.update_time import CHANGED, NO_UPDATE, UpdateTime, update_time
from libra_hpc.simulator.settings import SimulationSettings, run_settings
from libra_hpc.traces.run_work import Work, mean_context, run_work

from .train_layout import NO_HYBRID, Excluded, Hybrid, TrainChoice, TrainSpace


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
    core_rolls: bool = True
    """Whether all nodes are of the core, which rolls out, too; without, hybrid nodes alone serve both stages."""

    @property
    def keys(self) -> dict[str, Any]:
        """What the run file says of it, by dotted key."""
        return {"planner.time_sharing": "auto"} | ({"components.train.roll_out": True} if self.core_rolls else {})


class PlanRequest(msgspec.Struct, frozen=True):
    """The question of `libra_hpc.planning.best_plan`."""

    shape: ModelShape
    pools: tuple[DevicePool, ...]
    batch: TrainWork
    settings: SimulationSettings
    """Limits of engines, size of a batch, staleness bound."""
    space: TrainSpace
    work: Work
    """Batches to play."""
    train_factor: float = 1.0
    """Measured over counted seconds of training."""
    train_speed: str = ""
    """Its source, in words; empty: not measured."""
    updated: UpdateTime | None = None
    """New weights as a run measured them."""
    notes: tuple[str, ...] = ()
    policy: str = "cmlfq"
    hybrid: Hybrid = NO_HYBRID
    """Which nodes are hybrid; known with the final pools."""
    hosts: HostUse = HostUse()
    in_turn: InTurn | None = None
    """How nodes may serve both stages."""
    switch_from: str = "assumed: --switch-s"
    """Source of their switches, in words."""

    @property
    def trajectories(self) -> int:
        """Trajectories of a batch."""
        return self.settings.batch_groups * self.work.group

    @property
    def update(self) -> UpdateTime:
        """New weights from one training process to engines of one GPU; over the slowest network of the pools."""
        slowest = min((pool.device for pool in self.pools), key=lambda device: device.inter_bytes_s)
        return self.updated or update_time(self.shape, slowest)

    @property
    def updated_from(self) -> str:
        """Source of `update`, in words."""
        return f"assumed, {CHANGED:.0%} changed" if self.updated is None else "measured"

    def facts(self) -> dict[str, Any]:
        """Plain data, for records."""
        return {
            "model": self.shape.name,
            "pools": [{"device": p.device.name, "nodes": p.nodes, "node_devices": p.node_devices} for p in self.pools],
            "trajectories": self.trajectories,
            "eta": self.settings.eta,
            "lengths": self.work.summary(self.settings.batch_groups)._asdict(),
            "lengths_from": self.work.source,
        }


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
    """Nodes of its core, which own the optimizer's state."""
    train: TrainChoice
    engines: tuple[PoolEngines, ...]
    """One entry for each pool that rolls out."""
    hybrid: int
    """Hybrid nodes; with the core they are all of the pool that train in turn."""
    rollout_s: float = 0.0
    """Until a batch is complete; of overlapping batches, in which engines compute."""
    seconds: float = 0.0
    """Seconds of one global batch."""
    error_s: float = 0.0
    """Two standard errors of them."""
    tokens_s: float = 0.0
    """Tokens of finished trajectories, trained on, per second."""
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
    kept: bool = False
    """Whether it is the answer to an equal question of before."""


KIND = ("partition", "gpu_type", "gpus", "constraint")
"""Fields in which nodes of one kind agree."""


def as_planned(config: RunConfig) -> RunConfig:
    """``config`` with whole nodes of ``planner.device`` for components without GPUs."""
    parts = config.components
    if not config.planner.device or any(c.gpus for c in (parts.train, parts.hybrid, parts.rollout)):
        return config
    file = Path(config.planner.devices) if config.planner.devices else None
    found = _device(config.planner.device, file, "planner.device")
    filled = {
        name: msgspec.structs.replace(getattr(parts, name), gpus=found.devices_per_node)
        for name in ("train", "hybrid", "rollout")
    }
    return msgspec.structs.replace(config, components=msgspec.structs.replace(parts, **filled))


def request(config: RunConfig, *, gpus: int = 0, rooms: Mapping[str, HostRoom] = MappingProxyType({})) -> PlanRequest:
    """The question for ``config`` and its planner section, or for so many ``gpus`` instead of its nodes.

    ``rooms``: host memory of the nodes of each component.

    Raises `UserError` for an unknown model or device, GPUs that are not whole nodes, and what `run_work` refuses.
    """
    own, algorithm, rollout, settings = config.planner, config.algorithm, config.rollout, run_settings(config)
    if not (own.model or config.model.path):
        raise invalid(
            "model.path",
            "",
            "not given",
            "a model folder in the run file, or planner.model with a folder or a known name such as qwen3-14b",
        )
    dtype_bytes = DTYPE_BYTES[config.model.dtype]
    shape = msgspec.structs.replace(model_shape(own.model or config.model.path), dtype_bytes=dtype_bytes)
    shape = with_adapters(shape, *config.lora.arguments)
    devices_file = Path(own.devices) if own.devices else None
    if _without_nodes(config, gpus):
        pools = [_given_gpus(config, devices_file, gpus, rooms.get("train", HostRoom()))]
    else:
        pools = _pools(config, devices_file, rooms)
    if config.steps_ahead:
        pools = [msgspec.structs.replace(one, device=one.device.asynchronous()) for one in pools]
    work = run_work(config)
    sample = work.sample(settings.batch_groups)
    # Of short sequences an engine holds fewer tokens than of long ones, where layers have windows; with states, too.
    shape = shape.with_kv(rollout.kv_dtype, max(1, round(mean_context(sample))), rollout.block_size)
    reference = reference_shape(config, shape)
    return PlanRequest(
        shape=shape,
        pools=tuple(pools),
        batch=work_of(
            [(one.context, one.generated) for one in sample],
            settings.batch_groups * work.group,
            minibatches=algorithm.minibatches,
            reference=reference,
        ),
        settings=settings,
        space=TrainSpace(
            recompute=(config.train.recompute,) if "train.recompute" in config.given else RECOMPUTE,
            host=config.optimizer.host,
        ),
        work=work,
        policy=rollout.policy,
        hosts=HostUse(
            core=node_work(config, "train", reference),
            rolls=node_work(config, "rollout", reference if config.components.hybrid.nodes else None),
            optional="train.snapshot_every" not in config.given,
        ),
        notes=(config.engine_words, *_notes(shape)),
    )


def _notes(shape: ModelShape) -> Iterator[str]:
    if shape.untrained:
        yield f"this version cannot train {shape.name} ({shape.untrained}); the plan is for study"
    if shape.kv_ratio < 1:
        yield f"KV caches in FP8 hold {1 / shape.kv_ratio:g} times the tokens (rollout.kv_dtype)"


def _without_nodes(config: RunConfig, gpus: int) -> bool:
    return bool(gpus) or not any(part.gpus for part in stages(config).values())


def _given_gpus(config: RunConfig, devices_file: Path | None, gpus: int, room: HostRoom) -> DevicePool:
    """So many GPUs, whatever nodes the run file has."""
    parts, own = stages(config).values(), config.planner.device
    name = own or next((part.gpu_type for part in parts if part.gpu_type), "")
    if not name or not gpus:
        raise UserError(
            "components.train.gpus = 0: no GPUs to plan for; valid: a number of GPUs and a gpu_type, or --gpus and"
            " planner.device."
        )
    found = _device(name, devices_file, "device" if own else "components.train.gpu_type")
    per_node = found.devices_per_node
    if not own:
        per_node = next((part.gpus for part in parts if part.gpus), per_node)
    check_gpus(gpus, per_node)
    return DevicePool(found, gpus // per_node, per_node, room)


def _pools(config: RunConfig, devices_file: Path | None, rooms: Mapping[str, HostRoom]) -> list[DevicePool]:
    """The nodes of the run file; those with the same kind and number of GPUs are one pool, with the least room."""
    merged: dict[tuple[str, int], DevicePool] = {}
    own = config.planner.device
    for name, part in stages(config).items():
        field = f"components.{name}"
        if not part.gpus:
            raise invalid(
                f"{field}.gpus", 0, "the other components have GPUs", "an integer >= 1, or --gpus and planner.device"
            )
        if not (own or part.gpu_type):
            why = "the planner has to know the GPU"
            raise invalid(f"{field}.gpu_type", "", why, "a device it knows, such as a800, or planner.device")
        found = _device(own or part.gpu_type, devices_file, "device" if own else f"{field}.gpu_type")
        key = (found.name, part.gpus)
        before = merged.get(key, DevicePool(found, 0, part.gpus))
        room = before.room.least(rooms.get(name, HostRoom()))
        merged[key] = msgspec.structs.replace(before, nodes=before.nodes + part.nodes, room=room)
    return list(merged.values())


def kind(component: Component) -> tuple[object, ...]:
    """Nodes of one kind can take each other's place."""
    return tuple(getattr(component, key) for key in KIND)


def check_gpus(gpus: int, per_node: int) -> None:
    """Raise `UserError` unless so many GPUs are at least two whole nodes."""
    if gpus < 2 * per_node or gpus % per_node:
        raise invalid(
            "gpus",
            gpus,
            f"nodes have {per_node} of them and each stage needs a node",
            f"a multiple of {per_node} from {2 * per_node}",
        )


def _device(name: str, devices_file: Path | None, field: str) -> Device:
    try:
        return device(name, devices_file)
    except UserError as error:
        if field == "device":
            raise
        raise UserError(str(error).replace("device =", f"{field} =", 1)) from None
