"""What the schema alone cannot see: fields that contradict each other, the model folder, the task file.

Each check is a small function from facts to the mistakes it finds; `problems` runs them in the order a user would fix them, and `check_run` adds the
files.  Only functions named ``read_*`` and ``check_*`` touch files.  Whether the job fits the cluster is `libra_hpc.slurm.fit`'s question.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from libra_hpc.config.job import Component
from libra_hpc.config.rollout import of_node
from libra_hpc.config.run import RunConfig
from libra_hpc.errors import UserError, invalid, nearest, said
from libra_hpc.hardware.models import ModelShape, shape_from_config
from libra_hpc.hardware.supported import refusals
from libra_hpc.rollout.history import check_warm_start
from libra_hpc.sched.registry import check_policy
from libra_hpc.slurm.query import slurm_seconds
from libra_hpc.tasks.registry import BUILTIN
from libra_hpc.twin.rehearsal import check_twin

from .resources import check_memory, check_nodes

TIME_FORMATS = "minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes or days-hours:minutes:seconds"
MODEL_FILES = {"config.json": ["config.json"], "tokenizer": ["tokenizer.json", "tokenizer.model"], "safetensors": ["*.safetensors"]}
"""What a policy folder holds, and file patterns of which at least one must match."""


def problems(config: RunConfig, model: Mapping[str, Any] | None = None) -> Iterator[UserError]:
    """Every mistake found from facts alone; ``model`` is the parsed config.json of the policy, or None to leave its checks out."""
    for check in CONFIG_CHECKS:
        yield from check(config)
    if model is not None:
        for model_check in MODEL_CHECKS:
            yield from model_check(config, model)


def check_run(config: RunConfig) -> list[str]:
    """Raise the first mistake of a run file, model folder, task file and run directory included.

    Returns what could not be checked, a sentence each.
    """
    for error in problems(config):
        raise error
    check_run_dir(config)
    if config.rollout.warm_start:
        check_warm_start(config.rollout.warm_start)
    if config.run.engine == "real":
        check_task(config.task.name, config.task.options)
        warnings = check_engines(config)
        check_nodes(config, _shape(config, read_model_config(config)))
        return warnings
    check_engines(config)
    return check_memory(config, None)


def check_engines(config: RunConfig) -> list[str]:
    """Raise the first mistake that would keep the engines of a configuration from starting.

    Reads the policy's config.json, or what a rehearsal simulates.  Returns what could not be checked, a sentence each.
    """
    if config.run.engine == "twin":
        for error in problems(config):
            raise error
        check_twin(config)
        return []
    model = read_model_config(config)
    for error in problems(config, model):
        raise error
    return check_memory(config, _shape(config, model))


def _shape(config: RunConfig, model: dict[str, Any]) -> ModelShape:
    """Shape of the policy, under its folder's name."""
    return shape_from_config(model, Path(config.model.path).name)


def component_counts(config: RunConfig) -> Iterator[UserError]:
    """One planner, and at least one core node of each stage."""
    if config.components.planner.nodes != 1:
        yield invalid("components.planner.nodes", config.components.planner.nodes, "rank 0 is the one planner", "1")
    for name in ("train", "rollout"):
        nodes = getattr(config.components, name).nodes
        if nodes < 1:
            yield invalid(f"components.{name}.nodes", nodes, "each stage keeps a core node while hybrid nodes move", "an integer >= 1")


def known_policy(config: RunConfig) -> Iterator[UserError]:
    """``rollout.policy`` names a scheduling policy for live runs."""
    try:
        check_policy(config.rollout.policy)
    except UserError as error:
        yield error


def one_value_per_node(config: RunConfig) -> Iterator[UserError]:
    """A list of the rollout section has one entry for each hybrid and each rollout node."""
    hybrid, rollout = config.components.hybrid.nodes, config.components.rollout.nodes
    for name in ("tp", "engines_per_node"):
        value = getattr(config.rollout, name)
        if isinstance(value, list) and len(value) != hybrid + rollout:
            why = f"a list has one entry for each of the {hybrid} hybrid and {rollout} rollout nodes, in this order, and this one has {len(value)}"
            yield invalid(f"rollout.{name}", value, why, f"an integer, or a list of {hybrid + rollout}")


def batch_split(config: RunConfig) -> Iterator[UserError]:
    """A minibatch holds at least one trajectory."""
    batch = config.algorithm.prompts_per_step * config.algorithm.group_size
    if config.algorithm.minibatches > batch:
        yield invalid("algorithm.minibatches", config.algorithm.minibatches, f"a global batch has {batch} trajectories", f"1 to {batch}")


def well_formed_time(config: RunConfig) -> Iterator[UserError]:
    """``slurm.time_limit`` is a time Slurm understands."""
    try:
        seconds = slurm_seconds(config.slurm.time_limit)
    except ValueError:
        yield invalid("slurm.time_limit", config.slurm.time_limit, "malformed", TIME_FORMATS)
    else:
        if seconds == 0:
            yield invalid("slurm.time_limit", config.slurm.time_limit, "no time at all", TIME_FORMATS)


def gpus_hold_engines(config: RunConfig) -> Iterator[UserError]:
    """On GPUs, also on simulated ones, every tensor- or pipeline-parallel rank of every engine of a node has its own device."""
    if (config.slurm.device != "cuda" and config.run.engine == "real") or any(one_value_per_node(config)):
        return
    for name in ("train", "hybrid", "rollout"):
        component: Component = getattr(config.components, name)
        if not component.nodes:
            continue
        products = [{"train.tp": config.train.tp, "train.pp": config.train.pp}] if name != "rollout" else []
        for node in engine_nodes(config, name):
            product = {f"rollout.{key}": of_node(getattr(config.rollout, key), node) for key in ("tp", "engines_per_node")}
            if product not in products:
                products.append(product)
        for product in products:
            needs = math.prod(product.values())
            if needs > component.gpus:
                field = max(product, key=lambda key: product[key])
                why = f"{' * '.join(product)} needs {needs} GPUs and components.{name} has {component.gpus} per node"
                yield invalid(field, product[field], why, f"a product <= {component.gpus}")


def engine_nodes(config: RunConfig, component: str) -> range:
    """Positions of a component's nodes among the hybrid and rollout nodes; empty for the others."""
    hybrid = config.components.hybrid.nodes
    nodes = {"hybrid": range(hybrid), "rollout": range(hybrid, hybrid + config.components.rollout.nodes)}
    return nodes.get(component, range(0))


CONFIG_CHECKS: tuple[Callable[[RunConfig], Iterator[UserError]], ...] = (
    component_counts,
    known_policy,
    one_value_per_node,
    batch_split,
    well_formed_time,
    gpus_hold_engines,
)


def trainable(config: RunConfig, model: Mapping[str, Any]) -> Iterator[UserError]:
    """The engines have this architecture and variant, and every count that its shape needs is one."""
    found = [refusal.error("model.path") for refusal in refusals(model)]
    yield from found
    if not found:
        try:
            shape_from_config(dict(model), "model.path")
        except UserError as error:
            yield error


def tensor_parallel_divides(config: RunConfig, model: Mapping[str, Any]) -> Iterator[UserError]:
    """Training shards heads, key-value heads, the MLP and the vocabulary; rollout replicates what it cannot shard, except attention heads."""
    heads = int(model.get("num_attention_heads", 1))
    kv = int(model.get("num_key_value_heads") or heads)
    widths = {
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "intermediate_size": int(model.get("intermediate_size", 0)),
        "vocab_size": int(model.get("vocab_size", 0)),
    }
    for key, width in widths.items():
        if width % config.train.tp:
            yield invalid("train.tp", config.train.tp, f"does not divide the model's {key} = {width}", _divisors(width))
    degrees = config.rollout.tp if isinstance(config.rollout.tp, list) else [config.rollout.tp]
    for tp in dict.fromkeys(degrees):
        if heads % tp:
            yield invalid("rollout.tp", tp, f"does not divide the model's num_attention_heads = {heads}", _divisors(heads))
        elif kv % tp and tp % kv:
            why = f"neither divides the model's num_key_value_heads = {kv} nor is a multiple of it"
            yield invalid("rollout.tp", tp, why, _divisors(kv))


def pipeline_divides(config: RunConfig, model: Mapping[str, Any]) -> Iterator[UserError]:
    """Every pipeline stage has the same number of layers."""
    layers = int(model.get("num_hidden_layers", 1))
    if layers % config.train.pp:
        yield invalid("train.pp", config.train.pp, f"does not divide the model's num_hidden_layers = {layers}", _divisors(layers))


def context_fits(config: RunConfig, model: Mapping[str, Any]) -> Iterator[UserError]:
    """Trajectories are no longer than the positions the model knows."""
    positions = model.get("max_position_embeddings")
    if isinstance(positions, int) and config.rollout.max_model_len > positions:
        why = f"the model's max_position_embeddings is {positions}"
        yield invalid("rollout.max_model_len", config.rollout.max_model_len, why, f"16 to {positions}")


MODEL_CHECKS: tuple[Callable[[RunConfig, Mapping[str, Any]], Iterator[UserError]], ...] = (
    trainable,
    tensor_parallel_divides,
    pipeline_divides,
    context_fits,
)


def _divisors(width: int) -> str:
    return ", ".join(str(n) for n in (1, 2, 3, 4, 5, 6, 8, 16, 32) if width % n == 0)


def read_model_config(config: RunConfig) -> dict[str, Any]:
    """Parse the policy's config.json; raises `UserError` when the folder is not a complete Hugging Face model."""
    path, folder = config.model.path, Path(config.model.path)
    if not path:
        raise invalid("model.path", path, "not given", "a Hugging Face folder with config.json, safetensors and a tokenizer")
    if not folder.is_dir():
        raise invalid("model.path", path, "no such folder", "a Hugging Face folder with config.json, safetensors and a tokenizer")
    for what, patterns in MODEL_FILES.items():
        if not any(next(folder.glob(pattern), None) for pattern in patterns):
            raise invalid("model.path", path, f"the folder has no {what}", f"a folder with {' or '.join(patterns)}")
    try:
        model = json.loads((folder / "config.json").read_bytes())
    except RecursionError as error:
        raise invalid("model.path", path, "its config.json is nested too deeply") from error
    except (OSError, ValueError) as error:
        raise invalid("model.path", path, f"its config.json is not valid JSON ({said(error)})") from error
    if not isinstance(model, dict):
        raise invalid("model.path", path, "its config.json is not a JSON object")
    return model


def check_run_dir(config: RunConfig) -> None:
    """Raise `UserError` when run directories cannot be made below ``run.dir``; makes nothing itself."""
    parent = Path(config.run.dir).absolute()
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir():
        raise invalid("run.dir", config.run.dir, f"{parent} is not a folder", "a writable folder on a file system all nodes share")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise invalid("run.dir", config.run.dir, f"{parent} is not writable", "a writable folder on a file system all nodes share")


def check_task(name: str, options: Iterable[str] = ()) -> None:
    """Raise `UserError` unless ``name`` is a built-in task or ``file.py:Class`` whose file defines that class, with a constructor that takes ``options``.

    The file is parsed, never run: what it imports need not be installed where runs are submitted.
    """
    path, separator, wanted = name.rpartition(":")
    if not separator:
        if name not in BUILTIN:
            raise invalid("task.name", name, "unknown task", [*BUILTIN, "path/to/file.py:ClassName"])
        module, wanted = BUILTIN[name]
        spec = importlib.util.find_spec(module)
        assert spec is not None
        assert spec.origin is not None
        path = spec.origin
    try:
        tree = ast.parse(Path(path).read_text(encoding="utf-8"), path)
    except OSError as error:
        raise invalid("task.name", name, f"{path} cannot be read ({error.strerror})", "path/to/file.py:ClassName") from error
    except (SyntaxError, ValueError) as error:
        raise invalid("task.name", name, f"{path} is not valid Python ({error})", "path/to/file.py:ClassName") from error
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    if wanted not in classes:
        known = f"valid: {', '.join(classes)}{nearest(wanted, classes)}" if classes else "it defines none"
        raise UserError(f"task.name = {name!r}: {path} defines no class {wanted!r}; {known}.")
    taken = _constructor_options(classes[wanted])
    for option in options:
        if taken is not None and option not in taken:
            raise invalid("task.options", option, f"{wanted} has no such option", taken)


def _constructor_options(task: ast.ClassDef) -> list[str] | None:
    """Names of what a task's constructor takes behind the tokenizer; None where the class text does not tell."""
    for node in task.body:
        if isinstance(node, ast.FunctionDef) and node.name == "__init__" and node.args.kwarg is None:
            return [argument.arg for argument in (*node.args.args[2:], *node.args.kwonlyargs)]
    return None
