"""From a run file to the planner's question: model, nodes, batch and lengths.

Components that train or roll out, with the same kind and number of GPUs, form one pool. Lengths come from a trace, else
from assumed shares of the longest context (`Assumed`), and the answer states which: the split depends on them most.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from libra_hpc.config.job import Component
from libra_hpc.config.run import RunConfig
from libra_hpc.errors import UserError, invalid
from libra_hpc.facts.rundir import RunDir
from libra_hpc.models.devices import Device, device
from libra_hpc.models.shapes import DTYPE_BYTES, ModelShape, model_shape
from libra_hpc.policies.costs.factors import NONE, Factors
from libra_hpc.policies.costs.lengths import Lengths, TrajectoryLengths, lognormal, observe, sketch
from libra_hpc.policies.costs.rollout_time import RolloutOptions
from libra_hpc.policies.costs.training_time import BatchWork
from libra_hpc.policies.search.best_plan import DevicePool
from libra_hpc.policies.search.train_layout import NO_HYBRID, Hybrid, TrainSpace
from libra_hpc.protocol.trace import TrajectoryRecord
from libra_hpc.traces.cut import cut_at
from libra_hpc.traces.read import read_trace

from .measured_train_speed import measured_factor, training_factors
from .work import Assumed, Work


class PlanRequest(msgspec.Struct, frozen=True):
    """Arguments of `libra_hpc.policies.search.best_plan.plan`."""

    shape: ModelShape
    pools: tuple[DevicePool, ...]
    batch: BatchWork
    options: RolloutOptions
    space: TrainSpace
    lengths: str
    """Source of the lengths, in words."""
    work: Work
    """Batches to simulate."""
    factors: Factors = NONE
    """Corrections of the training model."""
    train_speed: str = ""
    """Source of these, in words; empty: not measured."""
    notes: tuple[str, ...] = ()
    policy: str = "cmlfq"
    hybrid: Hybrid = NO_HYBRID
    """Which nodes are hybrid; known with the final pools."""
    max_inflight: int = 96
    """Turns sent to an engine at once."""


KIND = ("partition", "gpu_type", "gpus", "constraint")
"""Fields in which nodes of one kind agree."""


def request(
    config: RunConfig,
    *,
    model: str = "",
    device_name: str = "",
    devices_file: Path | None = None,
    gpus: int = 0,
    trace: Path | None = None,
    train_speed: Path | None = None,
    assumed: Assumed = Assumed(),  # noqa: B008
) -> PlanRequest:
    """The question for ``config``; an option that is empty or 0 comes from the planner section or the run file.

    Raises `UserError` for an unknown model or device, GPUs that are not whole nodes, an unreadable trace, and a
    training speed that is unreadable or of another device.
    """
    own = config.planner
    model, device_name = model or own.model, device_name or own.device
    devices_file = devices_file or (Path(own.devices) if own.devices else None)
    trace = trace or (_trace_file(own.trace) if own.trace else None)
    train_speed = train_speed or (Path(own.train_speed) if own.train_speed else None)
    if not (model or config.model.path):
        raise invalid(
            "model.path",
            "",
            "not given",
            "a model folder in the run file, or --model with a folder or a known name such as qwen3-14b",
        )
    shape = msgspec.structs.replace(
        model_shape(model or config.model.path), dtype_bytes=DTYPE_BYTES[config.model.dtype]
    )
    pools = pools_of(config, device_name, devices_file, gpus)
    factors, speed_source = _factors(train_speed, pools)
    longest = config.rollout.max_model_len
    cut = cut_at([] if trace is None else read_trace(trace).trajectories, longest)
    recorded = [one for one in cut.trajectories if one.generated]
    observed, source = _lengths(recorded, trace, assumed, longest)
    algorithm = config.algorithm
    trajectories = algorithm.prompts_per_step * algorithm.group_size
    lengths = sketch(observed, trajectories)
    forwards = int(algorithm.minibatches > 1) + int(algorithm.kl_coef > 0)
    notes = []
    if shape.untrained:
        notes.append(f"this version cannot train {shape.name} ({shape.untrained}); the plan is for study")
    if cut.shortened:
        notes.append(f"rollout.max_model_len = {longest:,} ends {cut.shortened:,} trajectories of the trace early")
    if cut.left_out:
        notes.append(f"{cut.left_out:,} trajectories of the trace have prompts beyond rollout.max_model_len")
    given = config.train.recompute if "recompute" in config.train.model_fields_set else None
    space = TrainSpace() if given is None else TrainSpace(recompute=(given,))
    return PlanRequest(
        shape=shape,
        pools=tuple(pools),
        batch=BatchWork(
            trajectories=trajectories,
            lengths=lengths,
            eta=algorithm.eta,
            minibatches=algorithm.minibatches,
            forwards=forwards,
        ),
        options=RolloutOptions(
            max_num_seqs=config.rollout.max_num_seqs,
            max_model_len=config.rollout.max_model_len,
            group=algorithm.group_size,
            cache_aware=config.rollout.policy == "cmlfq",
            updates=1,
        ),
        space=space,
        lengths=source,
        work=Work(tuple(recorded), assumed, longest),
        policy=config.rollout.policy,
        max_inflight=config.rollout.max_inflight,
        factors=factors,
        train_speed=speed_source,
        notes=tuple(notes),
    )


def pools_of(
    config: RunConfig, device_name: str = "", devices_file: Path | None = None, gpus: int = 0
) -> list[DevicePool]:
    """The nodes to plan for: ``gpus`` devices called ``device_name``, or those of the run file's components."""
    parts = config.components
    components = [(name, getattr(parts, name)) for name in ("train", "hybrid", "rollout")]
    components = [(name, c) for name, c in components if c.nodes > 0]
    if gpus or not any(c.gpus for _, c in components):
        named = next((c.gpu_type for _, c in components if c.gpu_type), "")
        if not (device_name or named) or not gpus:
            raise UserError(
                "components.train.gpus = 0: no GPUs to plan for; valid: a number of GPUs and a gpu_type, or --gpus and"
                " --device."
            )
        found = _device(device_name or named, devices_file, "device" if device_name else "components.train.gpu_type")
        per_node = (
            next((c.gpus for _, c in components if c.gpus), found.devices_per_node)
            if not device_name
            else found.devices_per_node
        )
        check_gpus(gpus, per_node)
        return [DevicePool(found, gpus // per_node, per_node)]
    merged: dict[tuple[str, int], DevicePool] = {}
    for name, component in components:
        if not component.gpus:
            raise invalid(
                f"components.{name}.gpus",
                0,
                "the other components have GPUs",
                "an integer >= 1, or --gpus and --device",
            )
        if not (device_name or component.gpu_type):
            raise invalid(
                f"components.{name}.gpu_type",
                "",
                "the planner has to know the GPU",
                "a device it knows, such as a800, or --device",
            )
        found = _device(
            device_name or component.gpu_type, devices_file, "device" if device_name else f"components.{name}.gpu_type"
        )
        key = (found.name, component.gpus)
        before = merged[key].nodes if key in merged else 0
        merged[key] = DevicePool(found, before + component.nodes, component.gpus)
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


def describe(lengths: Lengths) -> str:
    return (
        f"generated {lengths.generated:,.0f} tokens, longest {lengths.bins[-1].generated:,.0f}; context up to"
        f" {lengths.longest_context:,}; {lengths.turns_per_token * lengths.generated:.1f} turns,"
        f" {lengths.tool_s_per_token * lengths.generated:.1f} s of tools"
    )


def _device(name: str, devices_file: Path | None, field: str) -> Device:
    try:
        return device(name, devices_file)
    except UserError as error:
        if field == "device":
            raise
        raise UserError(str(error).replace("device =", f"{field} =", 1)) from None


def _trace_file(path: str) -> Path:
    """The file of ``planner.trace``: itself, or the trajectories of a run directory."""
    return RunDir(path).trajectories if Path(path).is_dir() else Path(path)


def _factors(path: Path | None, pools: Sequence[DevicePool]) -> tuple[Factors, str]:
    if path is None:
        return NONE, ""
    found, names = measured_factor(path), [pool.device.name for pool in pools]
    if found.device not in names:
        raise invalid("planner.train_speed", str(path), f"measured on {found.device}", f"one of {', '.join(names)}")
    return training_factors(found.factor), f"{found.factor:.2f} x the model's seconds ({found.source})"


def _lengths(
    recorded: Sequence[TrajectoryRecord], trace: Path | None, assumed: Assumed, longest: int
) -> tuple[Sequence[TrajectoryLengths], str]:
    if trace is not None:
        observed = observe(recorded)
        return observed, f"{len(observed):,} trajectories of {trace.name}"
    made = lognormal(**assumed.means(longest)._asdict(), longest=longest)
    return made, f"assumed log-normal, shape {assumed.sigma:g} (measured ones: --trace FILE)"
