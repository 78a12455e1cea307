"""Whether a site has what a run needs, seen from the login node: one finding a question, with a way out of each fault.

Every check is a small function from facts to a `Finding`; `examine` asks Slurm for the facts once.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import msgspec

from libra_hpc.config.job import NO_OPTION, Component, MemOption
from libra_hpc.config.load import with_values
from libra_hpc.config.node_groups import SHARED, HetGroup, het_groups
from libra_hpc.config.run import RunConfig
from libra_hpc.errors import OperationError, UserError, invalid
from libra_hpc.process.child_environment import NO_PROXY
from libra_hpc.slurm.interpreter import check_container
from libra_hpc.slurm.queue.command import SlurmRefused, call
from libra_hpc.slurm.queue.query import Partition, on_cluster, partitions, settings

from .fit import Doubt, doubts, with_resources
from .interpreter import check_python, compute_python
from .launch import named_cluster, node_options
from .refusal import SPELLED, refusal

NO_STEPS = "disable_hetjob_steps"
COMMANDS = ("sbatch", "srun", "scontrol", "sinfo", "squeue", "scancel")
OLDEST = (20, 11)
"""Slurm's first release with ``srun --overlap``; heterogeneous steps are older."""
GPU_OPTIONS = ("--gres=gpu:{type}:{gpus}", "--gpus-per-node={type}:{gpus}", NO_OPTION)
LOCAL_KINDS = ("tmpfs", "overlay", "ext4", "xfs", "btrfs", "ramfs")
"""File systems that one node has for itself."""
FREE_BYTES = 20e9
"""A checkpoint of a 4B policy with optimizer state takes 56 GB; with less than this not even a tiny run is safe."""


class Finding(NamedTuple):
    """The answer to one question."""

    subject: str
    state: Literal["good", "warning", "bad"]
    found: str
    fix: str = ""
    """What to do about it; empty when it is good."""


class SlurmFacts(NamedTuple):
    """What the controller was asked, once."""

    version: str
    settings: dict[str, str]
    """Settings of ``scontrol show config``."""
    partitions: list[Partition]


def examine(config: RunConfig, env: Mapping[str, str] | None, why: str = "") -> list[Finding]:
    """All findings for a configuration (the site profile over defaults); ``env``: Slurm's client environment, None
    when no controller answers, for the reason ``why``."""
    found = [commands(os.environ if env is None else env)]
    if env is None:
        found.append(Finding("controller", "bad", why, "load the cluster's Slurm module, or ask its operators"))
    else:
        try:
            facts = slurm_facts(env, named_cluster(config))
        except OperationError as error:
            return [*found, Finding("controller", "bad", str(error).rstrip("."), "try again when Slurm answers")]
        found += [controller(facts, env), version(facts), heterogeneous(config, facts)]
        found += [accounting(facts), gpus(facts), *requests(config, env, facts)]
    image = container(config, env)
    # Without an image no interpreter can be looked for.
    python = [] if any(finding.state == "bad" for finding in image) else [interpreter(config)]
    return [*found, *python, *image, *proxies({**os.environ, **config.compute.env}), folder(Path(config.run.dir))]


def slurm_facts(env: Mapping[str, str], cluster: str = "") -> SlurmFacts:
    """Ask the controller, and ``cluster`` for its partitions; raises `OperationError` when it does not answer."""
    version = call(["sinfo", "--version"], env).strip()
    return SlurmFacts(version, settings(env), partitions(env, "--all", *on_cluster(cluster)))


def commands(env: Mapping[str, str]) -> Finding:
    """Slurm's client commands are on PATH."""
    missing = [name for name in COMMANDS if shutil.which(name, path=env.get("PATH", "")) is None]
    if missing:
        return Finding("Slurm commands", "bad", f"{', '.join(missing)} not on PATH", "load the cluster's Slurm module")
    return Finding("Slurm commands", "good", "all on PATH")


def controller(facts: SlurmFacts, env: Mapping[str, str]) -> Finding:
    """Which cluster would get a job."""
    name = facts.settings.get("ClusterName", "?")
    host = facts.settings.get("SlurmctldHost[0]", "?")
    return Finding("controller", "good", f"cluster {name} at {host} ({env.get('SLURM_CONF', 'default slurm.conf')})")


def version(facts: SlurmFacts) -> Finding:
    """Slurm is new enough."""
    number = re.search(r"(\d+)\.(\d+)", facts.version)
    old = number is not None and (int(number[1]), int(number[2])) < OLDEST
    fix = f"Slurm {OLDEST[0]}.{OLDEST[1]} or newer is needed" if old else ""
    return Finding("Slurm version", "bad" if old else "good", facts.version, fix)


def heterogeneous(config: RunConfig, facts: SlurmFacts) -> Finding:
    """Heterogeneous jobs are started by the backfill scheduler alone, and a site may allow no step over all of one."""
    kind, why = facts.settings.get("SchedulerType", "?"), ""
    if kind != "sched/backfill":
        why = "heterogeneous jobs start under sched/backfill only"
    elif NO_STEPS in facts.settings.get("SchedulerParameters", ""):
        kind, why = f"SchedulerParameters = {NO_STEPS}", "no step spans a heterogeneous job"
    if not why:
        return Finding("scheduler", "good", f"{kind}: heterogeneous jobs can start")
    plain = f"a plain job: components that agree in {', '.join(SHARED)}, one of a single node"
    return Finding("scheduler", "warning" if len(het_groups(config)) == 1 else "bad", f"{kind}: {why}", plain)


def accounting(facts: SlurmFacts) -> Finding:
    """Whether old jobs can be asked about."""
    if facts.settings.get("AccountingStorageType", "").endswith("slurmdbd"):
        return Finding("accounting", "good", "slurmdbd")
    age = facts.settings.get("MinJobAge", "300 sec")
    fix = "status and list then rely on what the run itself left"
    return Finding("accounting", "warning", f"none: Slurm drops a job {age} after its end", fix)


def gpus(facts: SlurmFacts) -> Finding:
    """Nodes with GPUs that Slurm can give away."""
    known = [
        f"{part.name}: {part.nodes} x {count} {kind or 'GPU'}"
        for part in facts.partitions
        for kind, count in part.gpus.items()
    ]
    if not known:
        return Finding(
            "GPUs",
            "warning",
            "no partition has any",
            "slurm.device = 'cpu', or where whole nodes are given slurm.gpu_option = 'none'",
        )
    return Finding("GPUs", "good", "; ".join(known))


def requests(config: RunConfig, env: Mapping[str, str], facts: SlurmFacts) -> list[Finding]:
    """Whether sbatch takes a node of each component as the profile asks for it, else in which of `spellings`."""
    try:
        return [_request(config, group.name, env, facts.partitions) for group in het_groups(config)]
    except OperationError as error:
        return [Finding("nodes", "warning", str(error).rstrip("."), "try again when Slurm answers")]


def _request(config: RunConfig, name: str, env: Mapping[str, str], known: Sequence[Partition]) -> Finding:
    subject, filled, why = f"nodes of {name}", with_resources(config, known), ""
    # What sinfo does not list is in no spelling there.
    last = any(doubt.field not in SPELLED for doubt in doubts(filled, known))
    mistake: Doubt | None = None
    for changes in spellings(config, name):
        changed = with_resources(with_values(config, changes), known)
        node = msgspec.structs.replace(getattr(changed.components, name), nodes=1)
        try:
            options = node_options(changed, HetGroup(name, node, (name,)))
            call(["sbatch", "--test-only", *options, "--wrap=true"], env, tries=1)
        except (SlurmRefused, UserError) as refused:
            why = why or str(refused)
            mistake = refusal(filled, why, known)
            if last or (mistake and mistake.field not in (*SPELLED, f"components.{name}.partition")):
                break
            continue
        lines = ", ".join(f'{key} = "{value}"' for key, value in changes.items())
        if not lines:
            return Finding(subject, "good", f"sbatch takes {' '.join(options)}")
        return Finding(subject, "bad", f"Slurm refuses them ({why})", lines)
    fix = str(invalid(*mistake)).rstrip(".") if mistake else "what this sentence asks for"
    return Finding(subject, "bad", f"Slurm refuses them ({why})", fix)


def spellings(config: RunConfig, name: str) -> list[dict[str, str]]:
    """Values of at most two keys that change how nodes of a component are asked for, those of the profile first."""
    component: Component = getattr(config.components, name)
    ways = {"slurm.mem_option": get_args(MemOption)}
    ways |= {"slurm.gpu_option": GPU_OPTIONS} if component.gpus else {}
    ways |= {f"components.{name}.partition": ("",)} if component.partition else {}
    single = [{key: value} for key, values in ways.items() for value in values]
    both = [{**one, **other} for one, other in combinations(single, 2) if one.keys() != other.keys()]
    return [{}, *single, *both]


def interpreter(config: RunConfig) -> Finding:
    """The compute nodes' interpreter has what a run needs."""
    try:
        warnings = check_python(config)
    except UserError as error:
        return Finding("interpreter", "bad", str(error).rstrip("."), "python3 envs/install.py cuda --venv DIR")
    if warnings:
        return Finding("interpreter", "warning", warnings[0], "libra-hpc doctor --submit looks on the nodes")
    return Finding("interpreter", "good", compute_python(config))


def container(config: RunConfig, env: Mapping[str, str] | None) -> list[Finding]:
    """The container's image, what starts it, and what it binds."""
    compute = config.compute
    try:
        warnings = check_container(config, env)
    except UserError as error:
        return [Finding("container", "bad", str(error).rstrip("."), "docs/site.md")]
    unseen = [Finding("container", "warning", warning, "a shared folder") for warning in warnings]
    found = [Finding("container", "good", f"{compute.container}: {compute.image}")]
    return unseen or (found if compute.container != "none" else [])


def proxies(env: Mapping[str, str]) -> list[Finding]:
    """The proxies that programs of a run would ask; a password in an address is left out."""
    named = [name for name in sorted(env) if name.lower().endswith("_proxy") and name not in NO_PROXY and env[name]]
    found = ", ".join(f"{name} = {re.sub('//.*@', '//', env[name])}" for name in named)
    return [Finding("proxy", "good", f"{found}; not for nodes of the run (no_proxy)")] if named else []


def folder(path: Path) -> Finding:
    """Run directories can be written, and every node sees them."""
    path = path.expanduser().absolute()
    there = next(parent for parent in (path, *path.parents) if parent.is_dir())
    if not os.access(there, os.W_OK):
        return Finding("run.dir", "bad", f"{there} is not writable", "run.dir = a shared folder of your own")
    free = shutil.disk_usage(there).free
    if free < FREE_BYTES:
        return Finding("run.dir", "warning", f"{free / 1e9:.0f} GB free in {there}", "more room for checkpoints")
    kind = file_system(there, Path("/proc/mounts").read_text().splitlines())
    if kind in LOCAL_KINDS:
        fix = "a folder that every compute node sees, unless all nodes are this machine"
        return Finding("run.dir", "warning", f"{there} is on {kind}, which one node has for itself", fix)
    return Finding("run.dir", "good", f"{there} ({kind}, {free / 1e9:.0f} GB free)")


def file_system(path: Path, mounts: Sequence[str]) -> str:
    """Kind of the file system that holds ``path``, by lines of ``/proc/mounts``; empty when none does."""
    found = [line.split() for line in mounts if len(line.split()) > 2]
    holding = [(len(words[1]), words[2]) for words in found if path.is_relative_to(words[1])]
    return max(holding, default=(0, ""))[1]
