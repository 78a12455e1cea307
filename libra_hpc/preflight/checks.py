"""Checks of a run file beyond its schema: fields that contradict each other, model, task, memory.

* Each check is a small function that yields the mistakes it finds.
* `problems` runs them in the order in which a user would fix them.
* `check_files` reads the named files (`preflight.named_files`).
* `check_run` adds GPU memory and CPUs (`preflight.gpu_memory`).
* What needs the cluster's answer: `preflight.checked_run`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from libra_hpc.config.learn import ADVANTAGES, INITIAL, LOSSES
from libra_hpc.config.load import named_paths
from libra_hpc.config.node_groups import stages
from libra_hpc.config.run import RunConfig
from libra_hpc.errors import UserError, invalid
from libra_hpc.models.adapters import with_adapters
from libra_hpc.models.shapes import ModelShape, model_shape, read_config, shape_from_config
from libra_hpc.models.supported import most_positions, refusals
from libra_hpc.policies.scheduling.registry import check_policy
from libra_hpc.slurm.queue.query import slurm_seconds
from libra_hpc.user_file import file_of

from .gpu_memory import GpuMemory, cache_type_runs, check_cpus, check_memory
from .idle_keys import idle_keys
from .job_checks import (
    cache_fits,
    context_ranks_have_tokens,
    delta_nets_run,
    model_fits_world,
    node_folders,
    own_variables,
    processes_have_gpus,
    sane_sizes,
    set_up_parses,
    shape_fits_world,
    worlds_are_whole,
)
from .named_files import (
    REFERENCE,
    check_function,
    check_reference,
    check_run_dir,
    check_tasks,
    check_vocabulary,
    check_weights,
    naming,
    read_model_config,
    reading,
)

LEAST_NOTICE_S = 30.0
"""Seconds of ``slurm.notice_s``: Slurm looks at time limits twice a minute."""
LEAST_S = 60
"""Seconds of ``slurm.time_limit``, for the same reason."""
TIME_FORMATS = (
    "minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes or days-hours:minutes:seconds"
)


def problems(config: RunConfig, model: Mapping[str, Any] | None = None) -> Iterator[UserError]:
    """Mistakes in the configuration; ``model`` is the policy's config.json, which passed `check_files`, None:
    without its checks."""
    for check in CONFIG_CHECKS:
        yield from check(config)
    if model is not None:
        for model_check in MODEL_CHECKS:
            yield from model_check(config, model)


def check_files(config: RunConfig) -> None:
    """Raise the first mistake in the files that a run file names: run directory, task, and the policy's folder."""
    for key, text in named_paths(config).items():
        file = file_of(text) or Path(text)
        if os.path.exists(file) and not os.path.isfile(file) and not os.path.isdir(file):
            raise invalid(key, text, "neither a file nor a folder", "what can be read twice")
    _raise_first(set_up_parses(config))
    with reading("run.dir", config.run.dir):
        check_run_dir(config)
    check_function("algorithm.advantage", config.algorithm.advantage, ADVANTAGES)
    check_function("algorithm.loss", config.algorithm.loss, LOSSES)
    if config.run.engine == "real":
        check_tasks(config.task)
        known = [one.name for one in config.task.eval]
        if config.checkpoint.best and config.checkpoint.best not in known:
            raise invalid(
                "checkpoint.best", config.checkpoint.best, "no such evaluation", known or "a [[task.eval]] name"
            )
        with reading("model.path", config.model.path):
            model = read_model_config(config)
            check_vocabulary(config.model.path, model)
            _raise_first(refusal.error("model.path") for refusal in refusals(model))
            shape_from_config(model, "model.path")
            check_weights(config.model.path)
        if config.algorithm.has_reference and config.algorithm.reference != INITIAL:
            with reading(REFERENCE, config.algorithm.reference):
                check_reference(config.algorithm.reference, config.model.path)


def check_run(config: RunConfig) -> tuple[ModelShape | None, GpuMemory]:
    """Raise the first mistake of a run file with its split, whose files passed `check_files`.

    Returns the shape of its model, and how that fits in GPU memory.
    """
    shape = check_layout(config)
    memory = check_memory(config, shape)
    check_cpus(config)
    return shape, memory


def check_layout(config: RunConfig) -> ModelShape | None:
    """Raise the first mistake but those of nodes; returns the shape of the model, None in a dry run, which has none."""
    if config.run.engine == "simulated":
        from libra_hpc.simulated.dry_run import check_simulated

        _raise_first(problems(config))
        with naming(config):
            check_simulated(config)
        _raise_first(shape_fits_world(config, model_shape(config.planner.model or config.model.path)))
        return None
    model = read_model_config(config)
    _raise_first(problems(config, model))
    return with_adapters(shape_from_config(model, Path(config.model.path).name), *config.lora.arguments)


def _raise_first(found: Iterator[UserError]) -> None:
    for error in found:
        raise error


def component_counts(config: RunConfig) -> Iterator[UserError]:
    """One planner, and at least one core node of each stage unless nodes serve both."""
    if config.components.planner.nodes > 1:
        why = "rank 0 is the one planner"
        yield invalid("components.planner.nodes", config.components.planner.nodes, why, "0 or 1")
    parts, why = config.components, "each stage keeps a core node while hybrid nodes move"
    if not parts.train.nodes:
        yield invalid("components.train.nodes", 0, why, "an integer >= 1")
    both = config.planner.time_sharing == "auto" and (parts.hybrid.nodes > 0 or parts.train.roll_out)
    if not (parts.rollout.nodes or both):
        other = 'planner.time_sharing = "auto" and hybrid nodes or components.train.roll_out = true'
        yield invalid("components.rollout.nodes", 0, why, f"an integer >= 1, or {other}")


def core_rolls_out(config: RunConfig) -> Iterator[UserError]:
    """Train nodes roll out, too, only in time-sharing, and with trainers beside the engines."""
    field, valid = "components.train.roll_out", "false"
    if not config.components.train.roll_out:
        return
    if config.planner.time_sharing != "auto" or not config.planner.enabled:
        why = "nodes serve both stages by time-sharing alone"
        yield invalid(field, True, why, f'{valid}, or planner.time_sharing = "auto" and planner.enabled = true')
    for name in ("tp", "engines_per_node"):
        if isinstance(value := getattr(config.rollout, name), list):
            why = "a list has no entries for train nodes, and components.train.roll_out = true"
            yield invalid(f"rollout.{name}", value, why, "an integer")
    hosted = (config.optimizer.host or config.lora.rank > 0) and config.model.dtype != "float32"
    if config.run.engine == "real" and config.slurm.device == "cuda" and not hosted:
        why = "engines need the memory of weights and optimizer meanwhile"
        yield invalid(field, True, why, f'{valid}, or optimizer.host = true or [lora], and model.dtype = "bfloat16"')


def known_policy(config: RunConfig) -> Iterator[UserError]:
    """``rollout.policy`` is a scheduling policy that can be made."""
    try:
        check_policy(config.rollout.policy)
    except UserError as error:
        yield error


def one_value_per_node(config: RunConfig) -> Iterator[UserError]:
    """A list in the rollout section has one entry for each hybrid and each rollout node."""
    hybrid, rollout = config.components.hybrid.nodes, config.components.rollout.nodes
    for name in ("tp", "engines_per_node"):
        value = getattr(config.rollout, name)
        if isinstance(value, list) and len(value) != hybrid + rollout:
            why = (
                f"a list has one entry for each of the {hybrid} hybrid and {rollout} rollout nodes, in this order, and"
                f" this one has {len(value)}"
            )
            yield invalid(f"rollout.{name}", value, why, f"an integer, or a list of {hybrid + rollout}")


def rate(config: RunConfig) -> Iterator[UserError]:
    """The learning rate rises and falls within the run's updates."""
    optimizer, updates = config.optimizer, config.updates
    if optimizer.decay != "none" and optimizer.warmup_steps + max(1, optimizer.decay_steps) > updates:
        both = f"{optimizer.warmup_steps} updates of warm-up and {optimizer.decay_steps} of decay"
        why = f"{both} do not fit into the run's {updates}"
        yield invalid("optimizer.decay", optimizer.decay, why, "fewer optimizer.warmup_steps or decay_steps")


def masks(config: RunConfig) -> Iterator[UserError]:
    """Masks leave some ratio."""
    for name in ("mask_tokens", "mask_sequences"):
        bounds: list[float] = getattr(config.algorithm, name)
        if bounds and not bounds[0] < bounds[-1]:
            yield invalid(f"algorithm.{name}", bounds, "no ratio is between them", "[], or [low, high]")


def adapters_have_a_rank(config: RunConfig) -> Iterator[UserError]:
    """``[lora]`` without a rank would train all weights."""
    # The configuration of a run gives every key.
    if "lora.rank" not in config.given and any(key.startswith("lora.") for key in config.given):
        yield invalid("lora.rank", 0, "adapters need a rank", "an integer >= 1, or no [lora]")


def well_formed_time(config: RunConfig) -> Iterator[UserError]:
    """``slurm.time_limit`` is a time in Slurm's format, and the notice before it is long enough."""
    for section, text in (("slurm", config.slurm.time_limit), ("borrow.spot", config.borrow.spot.time_limit)):
        try:
            seconds = slurm_seconds(text)
        except ValueError:
            yield invalid(f"{section}.time_limit", text, "malformed", TIME_FORMATS)
        else:
            if seconds is not None and seconds < LEAST_S:
                why = "no time at all" if not seconds else f"{seconds} s, and Slurm looks at limits twice a minute"
                yield invalid(f"{section}.time_limit", text, why, TIME_FORMATS)
            elif section == "slurm" and seconds is not None and seconds <= config.slurm.notice_s:
                why = f"the run begins to save slurm.notice_s = {config.slurm.notice_s:g} s before it"
                yield invalid("slurm.time_limit", text, why, "a longer time")
    if 0.0 < config.slurm.notice_s < LEAST_NOTICE_S:
        why = "too short to save anything"
        yield invalid("slurm.notice_s", config.slurm.notice_s, why, f"0, or a number >= {LEAST_NOTICE_S:g}")


def gpus_hold_engines(config: RunConfig) -> Iterator[UserError]:
    """On real or simulated GPUs, every TP rank of every rollout engine of a node has its own device."""
    if (config.slurm.device != "cuda" and config.run.engine == "real") or any(one_value_per_node(config)):
        return
    for name, component in stages(config).items():
        for tp, engines in dict.fromkeys(config.rollout.on_node(node) for node in config.rollout_nodes(name)):
            needs = tp * engines
            product = "rollout.tp * rollout.engines_per_node needs"
            if not component.gpus:
                why = f"{product} {needs} GPU{'s' if needs > 1 else ''} per node"
                yield invalid(f"components.{name}.gpus", 0, why, f"an integer >= {needs}")
            elif needs > component.gpus:
                field, value = ("tp", tp) if tp >= engines else ("engines_per_node", engines)
                why = f"{product} {needs} GPUs and components.{name} has {component.gpus} per node"
                yield invalid(f"rollout.{field}", value, why, f"a product <= {component.gpus}")


CONFIG_CHECKS: tuple[Callable[[RunConfig], Iterator[UserError]], ...] = (
    sane_sizes,
    idle_keys,
    node_folders,
    component_counts,
    core_rolls_out,
    known_policy,
    one_value_per_node,
    masks,
    rate,
    adapters_have_a_rank,
    well_formed_time,
    processes_have_gpus,
    worlds_are_whole,
    context_ranks_have_tokens,
    gpus_hold_engines,
    own_variables,
)


def tensor_parallel_divides(config: RunConfig, model: Mapping[str, Any]) -> Iterator[UserError]:
    """Both engines can cut the model over their TP."""
    shape = shape_from_config(dict(model), "model.path")
    degrees = config.rollout.tp if isinstance(config.rollout.tp, list) else [config.rollout.tp]
    for field, tp in (("train.tp", config.train.tp), *(("rollout.tp", tp) for tp in dict.fromkeys(degrees))):
        try:
            shape.check_tp(tp, field, rollout=field == "rollout.tp")
        except UserError as error:
            yield error


def routing_has_experts(config: RunConfig, model: Mapping[str, Any]) -> Iterator[UserError]:
    """Only routers of a mixture can choose."""
    if config.algorithm.routing == "own" and not shape_from_config(dict(model), "model.path").experts:
        yield invalid("algorithm.routing", "own", "the model has no experts", "no such key")


def context_fits(config: RunConfig, model: Mapping[str, Any]) -> Iterator[UserError]:
    """Trajectories are no longer than the model's positions."""
    positions = most_positions(model)
    if positions is not None and config.rollout.max_model_len > positions:
        limit = "max_position_embeddings" if positions == model["max_position_embeddings"] else "YaRN's longest context"
        why = f"the model's {limit} is {positions}"
        yield invalid("rollout.max_model_len", config.rollout.max_model_len, why, f"16 to {positions}")


def reference_fits(config: RunConfig, model: Mapping[str, Any]) -> Iterator[UserError]:
    """The trainer's layout and the longest trajectory fit a reference policy of its own shape, too."""
    folder = config.algorithm.reference_folder(INITIAL)
    if folder not in ("", INITIAL):
        own = read_config(Path(folder) / "config.json", REFERENCE, folder)
        try:
            shape = shape_from_config(own, REFERENCE)
            shape.check_tp(config.train.tp, "train.tp")
            _raise_first(shape_fits_world(config, shape, frozen=True))
            _raise_first(context_fits(config, own))
        except UserError as error:
            yield UserError(f"{REFERENCE} = {folder!r} is another model: {error}")


MODEL_CHECKS: tuple[Callable[[RunConfig, Mapping[str, Any]], Iterator[UserError]], ...] = (
    tensor_parallel_divides,
    routing_has_experts,
    model_fits_world,
    context_fits,
    reference_fits,
    cache_type_runs,
    cache_fits,
    delta_nets_run,
)
