"""Checks of what a run file asks of its job: sizes within sane bounds, set-up lines that bash can read, variables.

A value beyond a bound is a slip of the pen.  The queue would take it, and the run would end hours later.
"""

from __future__ import annotations

import math
import os
import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from libra_hpc.config.node_groups import COMPONENTS, TrainWorld, core_world, elastic_world, memory_mb, stages
from libra_hpc.config.run import RunConfig
from libra_hpc.errors import UserError, invalid
from libra_hpc.models.adapters import SOON, least_rate
from libra_hpc.models.devices import MIB, blocks_of
from libra_hpc.models.shapes import DTYPE_BYTES, ModelShape, shape_from_config
from libra_hpc.models.supported import FAMILIES
from libra_hpc.models.train_parallel import cut_fault, expert_fault, world_fault

MOST_TRAJECTORIES = 1_000_000
"""Most trajectories of a step; one takes at least a kilobyte of the rollout leader's memory."""
LEAST_MEM_MB = 100.0
"""An agent alone takes 100 MB."""
BLOCK, USUAL_BLOCK = 16, 128
"""Tokens; attention reads the KV cache in pieces of the first, and engines have blocks up to the second."""
OWN = {
    "TMPDIR": "compute.local_dir",
    "CUDA_VISIBLE_DEVICES": "components.*.gpus",
    "PATH": 'a line such as export PATH="DIR:$PATH" in compute.setup',
}
"""Variables that the job gets from other keys."""
STARTED_WITH = ("SLURM_", "SBATCH_", "SRUN_", "PMI_", "PMIX_", "LIBRA_HPC_")
"""Prefixes of variables with which Slurm, MPI and the run's owner start a rank."""
KERNEL = re.compile(r"/(proc|sys|dev(?!/shm))/")
"""Where nobody makes folders."""
LEAVES = re.compile(r"\s*((exit|return)\b|exec\s+[^\s<>&\d]|set\s+(-n|-o\s+noexec)\b)")
"""A line of bash after which the script does not go on; ``exec`` alone may redirect."""
FREE = ("LIBRA_HPC_INTERPRETED",)
"""One for users all the same."""
BASH_S = 10.0


def sane_sizes(config: RunConfig) -> Iterator[UserError]:
    """Sizes that no run has."""
    parts = {name: getattr(config.components, name) for name in COMPONENTS}
    for name, part in parts.items():
        if part.nodes and part.mem and 0.0 < memory_mb(part.mem) < LEAST_MEM_MB:
            why = f"an agent alone takes {LEAST_MEM_MB:.0f} MB"
            yield invalid(f"components.{name}.mem", part.mem, why, "a size such as 16G, or 0 (all of the node)")
    algorithm, rollout = config.algorithm, config.rollout
    factors = {key: getattr(algorithm, key) for key in ("group_size", "prompts_per_step")}
    factors["eta"] = 0 if rollout.max_trajectories else algorithm.eta
    batch = factors["group_size"] * factors["prompts_per_step"] * (factors["eta"] + 1)
    if batch > MOST_TRAJECTORIES:
        key = max(factors, key=lambda key: factors[key])
        why = f"{batch:,} trajectories would be open at once"
        valid = f"at most {MOST_TRAJECTORIES:,} for (eta + 1) * prompts_per_step * group_size"
        yield invalid(f"algorithm.{key}", factors[key], why, valid)
    if rollout.max_model_len <= algorithm.overlong_soft:
        why = f"a trajectory has at most rollout.max_model_len = {rollout.max_model_len} tokens"
        yield invalid("algorithm.overlong_soft", algorithm.overlong_soft, why, f"less than {rollout.max_model_len}")
    if config.optimizer.lr * config.optimizer.weight_decay >= 1.0:
        why = f"times optimizer.lr = {config.optimizer.lr} a step removes every weight"
        valid = f"less than {1.0 / config.optimizer.lr:g}"
        yield invalid("optimizer.weight_decay", config.optimizer.weight_decay, why, valid)
    most, group = rollout.max_trajectories, algorithm.group_size
    if 0 < most < group:
        why = f"a prompt alone has algorithm.group_size = {group}"
        yield invalid("rollout.max_trajectories", most, why, f"0, or at least {group}")
    if config.run.engine == "real" and rollout.block_size % BLOCK:
        yield invalid("rollout.block_size", rollout.block_size, "vLLM has other blocks", f"multiples of {BLOCK}")
    if rollout.block_size > max(rollout.max_model_len, USUAL_BLOCK):
        why = f"a trajectory has at most rollout.max_model_len = {rollout.max_model_len} tokens"
        yield invalid("rollout.block_size", rollout.block_size, why, "a block within it")


def idle_seats(config: RunConfig) -> list[str]:
    """A warning where environment nodes have more seats than there are trajectories."""
    env, most = config.components.env, config.max_open_groups * config.algorithm.group_size
    needed = -(-most // env.room)
    if needed >= env.nodes:
        return []
    seats = f"{env.nodes} nodes of {env.room} seats for at most {most:,} open trajectories of training"
    return [f"components.env.nodes = {env.nodes}: {seats}; {needed} would do"]


def rounded_adapters(config: RunConfig) -> list[str]:
    """A warning where sums of weights in bfloat16 and adapters are mostly the weights as before."""
    lora, lr = config.lora, config.optimizer.lr
    if not lora.rank or config.model.dtype == "float32" or lr >= (least := least_rate(lora.rank, lora.alpha)):
        return []
    return [
        f"optimizer.lr = {lr:g}: adapters (lora.rank = {lora.rank}, lora.alpha = {lora.alpha:g}) move at most "
        f"{200 / math.pi * math.atan(lr / least):.2g} % of the weights in bfloat16 within {SOON} steps; "
        f"half from {least:.1e} on, or all with model.dtype = float32"
    ]


def node_folders(config: RunConfig) -> Iterator[UserError]:
    """``compute.local_dir`` and ``compute.cache_dir`` can be made on any node."""
    for key, disks in {"local_dir": "the nodes' own disks", "cache_dir": "a disk that all nodes share"}.items():
        given = getattr(config.compute, key)
        place = Path(os.path.normpath(given.partition("$")[0]))
        if KERNEL.match(f"{place}/") or any(
            os.path.exists(path) and not os.path.isdir(path) for path in (place, *place.parents)
        ):
            yield invalid(f"compute.{key}", given, "no folder can be made there", f"a folder of {disks}")


def cache_fits(config: RunConfig, model: Mapping[str, Any]) -> Iterator[UserError]:
    """Without GPUs, whose memory is checked elsewhere: the KV cache holds one trajectory."""
    rollout = config.rollout
    given = rollout.kv_cache_mb
    if not given or config.slurm.device == "cuda":
        return
    shape = shape_from_config(dict(model), "model.path").with_kv(
        rollout.kv_dtype, rollout.max_model_len, rollout.block_size
    )
    shape = msgspec.structs.replace(shape, dtype_bytes=DTYPE_BYTES[config.model.dtype])
    tokens = blocks_of(rollout.max_model_len, rollout.block_size) * rollout.block_size
    for name in ("hybrid", "rollout"):
        for tp in sorted({rollout.on_node(node)[0] for node in config.rollout_nodes(name)}):
            need = -(-tokens * shape.kv_bytes_per_device(tp) // MIB)
            if given < need:
                why = f"one trajectory of rollout.max_model_len = {rollout.max_model_len} tokens needs {need} MiB"
                yield invalid("rollout.kv_cache_mb", given, why, f"at least {need}, or 0 (what the node has)")


def delta_nets_run(config: RunConfig, model: Mapping[str, Any]) -> Iterator[UserError]:
    """vLLM has kernels for the model's gated delta nets."""
    kind = model.get("model_type")
    if config.slurm.device == "cpu" and FAMILIES[str(kind)].delta_net and config.model.dtype != "bfloat16":
        why = f"vLLM on CPUs computes the gated delta nets of {kind} in another type"
        yield invalid("model.dtype", config.model.dtype, why, ["bfloat16"])


def own_variables(config: RunConfig) -> Iterator[UserError]:
    """``compute.env`` leaves alone what the job sets itself."""
    for name, value in config.compute.env.items():
        field = f"compute.env.{name}"
        if name in OWN:
            yield invalid(field, value, "the job sets it itself", OWN[name])
        elif name.startswith(STARTED_WITH) and name not in FREE:
            yield invalid(field, value, "Slurm, MPI and libra-hpc set variables of this name", "another name")


def set_up_parses(config: RunConfig) -> Iterator[UserError]:
    """bash can read ``compute.setup``; nothing of it is executed."""
    setup = config.compute.setup
    if not setup:
        return
    for index, line in enumerate(setup):
        if LEAVES.match(line):
            why = "the script would end here, before the run"
            yield invalid(f"compute.setup[{index}]", line, why, "lines after which the script goes on")
        if line.startswith("#SBATCH"):
            yield invalid(f"compute.setup[{index}]", line, "sbatch reads options above it only", "slurm.extra")
    # A shell option that a line sets does not count yet, and extended patterns need one.
    done = subprocess.run(
        ["bash", "--norc", "-O", "extglob", "-n"],
        input="\n".join(setup) + "\n",
        env={**os.environ, "LC_ALL": "C"},
        capture_output=True,
        text=True,
        timeout=BASH_S,
    )
    valid = "lines that `bash -n` accepts"
    if found := re.search(r"^bash: (?:line (\d+): )?(?:warning: )?(.*)", done.stderr):
        # The end of the text is a line more, or has no number.
        index = min(int(found[1] or len(setup)), len(setup)) - 1
        yield invalid(f"compute.setup[{index}]", setup[index], found[2].replace("`", "'"), valid)
    elif (len(setup[-1]) - len(setup[-1].rstrip("\\"))) % 2:
        why = "its last backslash would join it with the script's next line"
        yield invalid(f"compute.setup[{len(setup) - 1}]", setup[-1], why, valid)


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
    fault = world_fault(core.degrees, core.nodes, core.processes)
    if fault is not None:
        yield fault
    elif hybrid.nodes:
        own, field = elastic_world(config), "components.hybrid.nodes_per_replica"
        if world_fault(own.degrees, own.nodes, own.processes) is not None:
            have = (
                f"a hybrid node has {own.processes}" if own.nodes == 1 else f"{own.nodes} hybrid nodes have {own.ranks}"
            )
            why = f"a replica of {own.degrees} needs {own.degrees.replica} processes, and {have}"
            least = own.degrees.replica // math.gcd(own.degrees.replica, own.processes)
            yield invalid(field, own.nodes, why, f"multiples of {least}, or components.hybrid.nodes = 0")
        elif hybrid.nodes % own.nodes:
            why = f"so many hybrid nodes move together, and there are {hybrid.nodes}"
            yield invalid(field, own.nodes, why, f"divisors of {hybrid.nodes}")


def context_ranks_have_tokens(config: RunConfig) -> Iterator[UserError]:
    """The longest micro-batch has a token for every piece of every context rank."""
    longest = max(config.train.micro_tokens, config.rollout.max_model_len)
    fault = cut_fault(core_world(config).degrees, longest)
    if fault is not None:
        yield fault


def model_fits_world(config: RunConfig, model: Mapping[str, Any]) -> Iterator[UserError]:
    """The trainer's layout fits the policy (`shape_fits_world`)."""
    yield from shape_fits_world(config, shape_from_config(dict(model), "model.path"))


def shape_fits_world(config: RunConfig, shape: ModelShape, *, frozen: bool = False) -> Iterator[UserError]:
    """Every stage has a layer; expert ranks divide the experts, and the processes of a stage of both worlds.

    ``frozen``: a model beside the policy, which may lack its experts.
    """
    if shape.layers < config.train.pp:
        yield invalid("train.pp", config.train.pp, f"the model has only {shape.layers} layers", f"1 to {shape.layers}")
    for name, world in worlds(config).items() if shape.experts or not frozen else ():
        where, ranks = "on hybrid nodes, " if name == "hybrid" else "", world.ranks // world.degrees.pp
        fault = expert_fault(shape.experts, shape.expert_columns, world.degrees, ranks, where)
        if fault is not None:
            yield fault
            return


def describe_worlds(config: RunConfig) -> str:
    """``core: 4 nodes x 8 GPUs, TP8 PP2, 2 replicas; hybrid: 1 node x 8 GPUs, 1 replica``."""
    has_gpus, found = config.slurm.device == "cuda" or config.run.engine == "simulated", []
    for name, world in worlds(config).items():
        nodes = getattr(config.components, name).nodes
        parts = [f"{_count(nodes, 'node')} x {_count(world.processes, 'GPU' if has_gpus else 'process')}"]
        parts += [str(world.degrees)] if name == "train" else []
        each = " each" if name == "hybrid" and nodes > 1 else ""
        each = f" on each {world.nodes}" if name == "hybrid" and world.nodes > 1 else each
        found.append(f"{'core' if name == 'train' else name}: {', '.join(parts)}, {_count(world.dp, 'replica')}{each}")
    return "; ".join(found)


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}{'es' if what.endswith('s') else 's'}"
