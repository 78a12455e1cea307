"""From a run file to a dry run: settings of the simulated processes, scaled planner times, and checks.

The planner uses the wall clock, on which modelled times pass ``speedup`` times faster.  So a dry run divides the times
of ``[planner]`` by it and multiplies ``moves_per_hour``.
"""

from __future__ import annotations

from pathlib import Path

from libra_hpc.config.job import Component
from libra_hpc.config.rollout import of_node
from libra_hpc.config.run import RunConfig
from libra_hpc.errors import UserError, invalid
from libra_hpc.models.capacity import blocks_of
from libra_hpc.models.devices import device
from libra_hpc.models.shapes import model_shape
from libra_hpc.models.step_times.lookup import lookup
from libra_hpc.traces import profiles
from libra_hpc.traces.read import read_trace

from .settings import Pace, Workload
from .workload import dials

TASK = "simulated"
"""Task name in records and for scheduling policies."""


def pace(config: RunConfig, component: str) -> Pace:
    """Settings of the simulated engines and trainers of one component."""
    simulated = config.simulated
    # A guest is taken to be such a node.
    nodes: Component = getattr(config.components, "rollout" if component == "guest" else component)
    return Pace(
        device=config.modelled("device") or nodes.gpu_type,
        devices=config.modelled("devices"),
        model=config.modelled("model") or config.model.path,
        calibration=simulated.calibration,
        source=simulated.source,
        speedup=simulated.speedup,
        mfu=simulated.mfu,
        step_s=simulated.step_s,
        start_s=simulated.start_s,
        wake_s=simulated.wake_s,
        sync_s=simulated.sync_s,
    )


def workload(config: RunConfig) -> Workload:
    """Settings of the simulated environment hosts."""
    simulated, algorithm = config.simulated, config.algorithm
    return Workload(
        trace=simulated.trace,
        presets=tuple(simulated.presets),
        sibling=simulated.sibling,
        outcome=simulated.outcome,
        drift=simulated.drift,
        prompts=max(1, config.run.steps * algorithm.prompts_per_step),  # a job that only evaluates trains none
        group=algorithm.group_size,
        max_context=config.rollout.max_model_len,
        seed=config.run.seed,
        speedup=simulated.speedup,
    )


def in_wall_time(config: RunConfig) -> RunConfig:
    """The configuration with planner times scaled to the wall clock; that of a real run is returned unchanged."""
    if config.run.engine == "real":
        return config
    planner, speedup = config.planner, config.simulated.speedup
    times = {name: getattr(planner, name) / speedup for name in planner.__struct_fields__ if name.endswith("_s")}
    moves = max(1, round(planner.moves_per_hour * speedup))
    return config.changed(planner={**times, "moves_per_hour": moves}, task={"name": TASK})


def check_simulated(config: RunConfig) -> None:
    """Raise `UserError` for hardware, a model or a workload that cannot be simulated."""
    for name in ("train", "hybrid", "rollout"):
        if getattr(config.components, name).nodes:
            _check_hardware(config, name)
    work = workload(config)
    if work.trace:
        read_trace(Path(work.trace))
        return
    for _, preset, part in dials(work):
        part.check(profiles.profile(preset))


def _check_hardware(config: RunConfig, component: str) -> None:
    modelled = pace(config, component)
    if not modelled.device:
        raise invalid("simulated.device", "", f"components.{component} has no gpu_type either", "a device such as a800")
    if not modelled.model:
        raise invalid(
            "simulated.model",
            "",
            "there is no model.path either",
            "a known model such as qwen3-14b, or a Hugging Face folder",
        )
    device(modelled.device, modelled.devices or None)
    shape = model_shape(modelled.model).with_kv(config.rollout.kv_dtype)
    if component != "rollout":
        shape.check_tp(config.train.tp)
    rollout = config.rollout
    for tp in sorted({of_node(rollout.tp, node) for node in config.rollout_nodes(component)}):
        steps = lookup(
            modelled.device,
            shape,
            tp,
            modelled.calibration or None,
            source=modelled.source,
            devices_file=modelled.devices or None,
        )
        if blocks_of(rollout.max_model_len, rollout.block_size) * rollout.block_size > steps.kv_capacity:
            raise UserError(
                f"rollout.max_model_len = {rollout.max_model_len}: the KV cache of {modelled.model} on {tp} x"
                f" {modelled.device} holds {steps.kv_capacity} tokens;"
                " valid: a shorter context, or a larger rollout.tp."
            )
