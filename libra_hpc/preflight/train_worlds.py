"""The Megatron worlds of a run file: checks by the predicate of `libra_hpc.models.train_parallel`, and words.

- A node has more training processes than GPUs -> refused.
- The core's nodes are no whole number of replicas, or tensor ranks would span nodes -> refused.
- Hybrid nodes that train as one world are no whole number of replicas -> refused.
- Expert ranks do not fit the model or a stage of either world -> refused.
- Context ranks would have pieces without a token -> refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from libra_hpc.config.node_groups import TrainWorld, core_world, elastic_world, stages
from libra_hpc.config.run import RunConfig
from libra_hpc.errors import UserError, invalid
from libra_hpc.models.shapes import ModelShape, shape_from_config
from libra_hpc.models.train_parallel import Degrees, cut_fault, expert_fault, world_fault


def degrees_of(world: TrainWorld) -> Degrees:
    """How a world of a run file cuts the model."""
    return Degrees(world.tp, world.pp, world.cp, world.ep, world.etp)


def worlds(config: RunConfig) -> dict[str, TrainWorld]:
    """The core's world, and that of a hybrid node where there are any, by component."""
    hybrid = {"hybrid": elastic_world(config)} if config.components.hybrid.nodes else {}
    return {"train": core_world(config), **hybrid}


def processes_have_gpus(config: RunConfig) -> Iterator[UserError]:
    """On real or simulated GPUs, every training process of a node has its own."""
    if config.slurm.device != "cuda" and config.run.engine == "real":
        return
    all_worlds = worlds(config)
    for name, part in stages(config).items():
        if name not in all_worlds:
            continue
        count, gpus = all_worlds[name].processes, part.gpus
        if not gpus:
            why = f"each of a node's {count} training processes needs one" if count > 1 else "training needs one"
            yield invalid(f"components.{name}.gpus", 0, why, f"an integer >= {count}")
        elif count > gpus:
            why = f"each of them needs a GPU, and components.{name} has {gpus} per node"
            yield invalid("train.processes", count, why, f"0 to {gpus}")


def worlds_are_whole(config: RunConfig) -> Iterator[UserError]:
    """The core and the worlds of hybrid nodes are whole numbers of replicas, whose tensor ranks share a node."""
    core, hybrid = core_world(config), config.components.hybrid
    fault = world_fault(degrees_of(core), core.nodes, core.processes)
    if fault is not None:
        yield fault.error()
    elif hybrid.nodes:
        own, field = elastic_world(config), "components.hybrid.nodes_per_replica"
        if world_fault(degrees_of(own), own.nodes, own.processes) is not None:
            have = (
                f"a hybrid node has {own.processes}" if own.nodes == 1 else f"{own.nodes} hybrid nodes have {own.ranks}"
            )
            why = f"a replica of {degrees_of(own)} needs {own.replica} processes, and {have}"
            least = own.replica // math.gcd(own.replica, own.processes)
            yield invalid(field, own.nodes, why, f"multiples of {least}, or components.hybrid.nodes = 0")
        elif hybrid.nodes % own.nodes:
            why = f"so many hybrid nodes move together, and there are {hybrid.nodes}"
            yield invalid(field, own.nodes, why, f"divisors of {hybrid.nodes}")


def context_ranks_have_tokens(config: RunConfig) -> Iterator[UserError]:
    """The longest micro-batch has a token for every piece of every context rank."""
    longest = max(config.train.micro_tokens, config.rollout.max_model_len)
    fault = cut_fault(degrees_of(core_world(config)), longest)
    if fault is not None:
        yield fault.error()


def experts_fit(config: RunConfig, model: Mapping[str, Any]) -> Iterator[UserError]:
    """Expert ranks divide the model's experts, and the processes of a stage of both worlds."""
    yield from _experts_of(config, shape_from_config(dict(model), "model.path"))


def trains_simulated(config: RunConfig, shape: ModelShape) -> Iterator[UserError]:
    """The model of a dry run has layers for all stages and experts for all expert ranks."""
    if shape.layers < config.train.pp:
        yield invalid("train.pp", config.train.pp, f"the model has only {shape.layers} layers", f"1 to {shape.layers}")
    yield from _experts_of(config, shape)


def _experts_of(config: RunConfig, shape: ModelShape) -> Iterator[UserError]:
    for name, world in worlds(config).items():
        fault = expert_fault(shape.experts, shape.expert_columns, degrees_of(world), world.ranks // world.pp)
        if fault is not None:
            where = "on hybrid nodes, " if name == "hybrid" else ""
            yield fault._replace(why=where + fault.why).error()
            return


def describe_worlds(config: RunConfig) -> str:
    """``core: 4 nodes x 8 GPUs, TP8 PP2, 2 replicas; hybrid: 1 node x 8 GPUs, 1 replica``."""
    has_gpus, found = config.slurm.device == "cuda" or config.run.engine == "simulated", []
    for name, world in worlds(config).items():
        nodes = getattr(config.components, name).nodes
        parts = [f"{_count(nodes, 'node')} x {_count(world.processes, 'GPU' if has_gpus else 'process')}"]
        parts += [str(degrees_of(world))] if name == "train" else []
        each = " each" if name == "hybrid" and nodes > 1 else ""
        each = f" on each {world.nodes}" if name == "hybrid" and world.nodes > 1 else each
        found.append(f"{'core' if name == 'train' else name}: {', '.join(parts)}, {_count(world.dp, 'replica')}{each}")
    return "; ".join(found)


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}{'es' if what.endswith('s') else 's'}"
