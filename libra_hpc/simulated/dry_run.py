"""From a run file to a dry run: what nodes are simulated as, scaled planner times, and checks.

The planner uses the wall clock, on which modelled times pass ``speedup`` times faster.  So a dry run divides the times
of ``[planner]`` by it and multiplies ``moves_per_hour``.
"""

from __future__ import annotations

from libra_hpc.config.job import Component
from libra_hpc.config.rollout import of_node
from libra_hpc.config.run import RunConfig
from libra_hpc.errors import UserError, invalid
from libra_hpc.models.devices import blocks_of, device
from libra_hpc.models.shapes import model_shape
from libra_hpc.models.step_times.lookup import lookup
from libra_hpc.traces.run_work import run_work

from .workload import in_order

TASK = "simulated"
"""Task name in records and for scheduling policies."""


def modelled(config: RunConfig, component: str) -> tuple[str, str, str]:
    """What the nodes of a component are simulated as: a device, the file that has it unless it is one of
    `libra_hpc.models.devices`, and the model's short name or folder."""
    # A guest is taken to be a rollout node.
    nodes: Component = getattr(config.components, "rollout" if component == "guest" else component)
    planner = config.planner
    return planner.device or nodes.gpu_type, planner.devices, planner.model or config.model.path


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
    for kind in in_order(config, run_work(config)):
        kind.batch(1, 0)


def _check_hardware(config: RunConfig, component: str) -> None:
    name, devices, model = modelled(config, component)
    if not name:
        raise invalid("planner.device", "", f"components.{component} has no gpu_type either", "a device such as a800")
    if not model:
        raise invalid(
            "planner.model",
            "",
            "there is no model.path either",
            "a known model such as qwen3-14b, or a Hugging Face folder",
        )
    device(name, devices or None)
    rollout = config.rollout
    shape = model_shape(model).with_kv(rollout.kv_dtype, rollout.max_model_len, rollout.block_size)
    if component != "rollout":
        shape.check_tp(config.train.tp)
    for tp in sorted({of_node(rollout.tp, node) for node in config.rollout_nodes(component)}):
        steps = lookup(name, shape, tp, config.simulated.calibration or None, devices_file=devices or None)
        if blocks_of(rollout.max_model_len, rollout.block_size) * rollout.block_size > steps.kv_capacity:
            raise UserError(
                f"rollout.max_model_len = {rollout.max_model_len}: the KV cache of {model} on {tp} x"
                f" {name} holds {steps.kv_capacity} tokens;"
                " valid: a shorter context, or a larger rollout.tp."
            )
