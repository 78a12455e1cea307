"""What a run file asks of Slurm, checked once (`JobRequest`), and one attempt of it to start (`Launch`)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from libra_hpc.config.job import NO_OPTION, Component, SlurmSection
from libra_hpc.config.load import flat
from libra_hpc.config.node_groups import COMPONENTS, SHARED, HetGroup, differing, het_groups, memory_mb, rank_components
from libra_hpc.config.run import RunConfig
from libra_hpc.errors import invalid
from libra_hpc.facts.rundir import RunDir

from .fit import whole_nodes, with_resources
from .interpreter import compute_python
from .queue.job_record import new_mark
from .queue.query import cluster_in

_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029]")
"""Would end a line of a script, or hide a part of it from who reads it."""

OPTIONAL = ("constraint", "reservation", "account", "qos")
"""sbatch options, and keys of a component, that may be `NO_OPTION`: it leaves out what stands above it."""
SPELLINGS = {
    "constraint": ("--constraint", "-C"),
    "reservation": ("--reservation",),
    "account": ("--account", "-A"),
    "qos": ("--qos", "-q"),
}
"""How sbatch spells them."""
GRES, COMMENT = "--gres=", "--comment="


class NodeRequest(NamedTuple):
    """Nodes that are requested together."""

    ranks: str
    """What runs on them, in words."""
    nodes: int
    options: list[str]
    """Options of sbatch."""
    used: int
    """Nodes that get an agent; the others are spare."""
    tasks: int


@dataclass(frozen=True)
class JobRequest:
    """A configuration and what it asks of Slurm."""

    config: RunConfig
    groups: Sequence[NodeRequest]
    """In rank order; empty for the local executor."""
    mail: Sequence[str]
    """sbatch options."""


def job_request(config: RunConfig) -> JobRequest:
    """The request of a configuration; raises `UserError` for a value that cannot be an sbatch option."""
    check_lines(config)
    if config.slurm.executor == "local":
        if spot := config.borrow.spot.nodes:
            raise invalid("borrow.spot.nodes", spot, "without Slurm there is no queue", "0, or slurm.executor = slurm")
        return JobRequest(config, (), ())
    slurm = config.slurm
    _check_spare(config)
    if slurm.requeues and slurm.preempted == "stop":
        why = f"Slurm queues the job again for slurm.requeues = {slurm.requeues} as it does for a preemption"
        raise invalid("slurm.preempted", "stop", why, "requeue, or slurm.requeues = 0")
    groups = [
        NodeRequest(
            " and ".join(dict.fromkeys(group.ranks)),
            group.component.nodes,
            node_options(config, group),
            group.nodes,
            len(group.ranks),
        )
        for group in het_groups(with_resources(config, ()))
    ]
    _word("run.name", config.run.name)
    _word("borrow.spot.qos", config.borrow.spot.qos)
    mail = _word("slurm.mail", slurm.mail)
    return JobRequest(config, groups, [f"--mail-user={mail}", f"--mail-type={','.join(slurm.mail_on)}"] if mail else [])


def _check_spare(config: RunConfig) -> None:
    """Raise `UserError` for a spare node that could not replace every other one."""
    spare, key = config.slurm.spare, next(iter(differing(config, COMPONENTS[:-1])), "")
    if spare and config.components.one_node:
        raise invalid("slurm.spare", spare, "one node carries all agents, and the job ends with it", "0")
    if spare and key:
        why = f"components differ in {key}, so no node can replace every other one"
        raise invalid("slurm.spare", spare, why, f"0, or components that agree in {', '.join(SHARED)}")


def check_lines(config: RunConfig) -> None:
    """Raise `UserError` for a text that can be no part of a line of a script."""
    parts = ("slurm.", "compute.", "components.")
    named = [(key, value) for key, value in flat(config.as_data(), ("compute.env",)).items() if key.startswith(parts)]
    for key, text in _texts([*named, ("run.dir", str(Path(config.run.dir).absolute()))]):
        if _CONTROL.search(text):
            raise invalid(key, text, "a control character cannot stand in a batch script", "one line of text")
        if key == "run.dir" and config.slurm.executor != "local" and re.search(r'["\\]', text):
            raise invalid(key, text, "sbatch cannot write logs there", 'a folder without " and \\')


def _texts(named: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, str]]:
    for key, value in named:
        if isinstance(value, str):
            yield key, value
        elif isinstance(value, list):
            yield from _texts((f"{key}[{index}]", one) for index, one in enumerate(value))
        elif isinstance(value, dict):
            yield from _texts((f"{key}.{name}", one) for name, one in value.items())


@dataclass(frozen=True)
class Launch:
    """One node agent per node of every component, in rank order."""

    request: JobRequest
    run: RunDir
    attempt: int
    """1 for the first submission of a run."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Further environment variables of the agents."""
    interpreter: str = ""
    """Interpreter on the nodes; empty: that of the run file (`compute_python`)."""
    arguments: Sequence[str] | None = None
    """Arguments of the interpreter instead of the agent's own; None: the agent's own."""
    after: str = ""
    """Slurm job that must have ended, in whatever way, before this one starts; empty: none."""
    from_step: int | None = None
    """Step at which the attempt begins; None: that of the newest whole state."""
    mark: str = field(default_factory=new_mark)
    """What its job's comment has, by which the job is known again."""

    @property
    def config(self) -> RunConfig:
        return self.request.config

    @property
    def python(self) -> str:
        """Interpreter that starts the agents."""
        return self.interpreter or compute_python(self.config)

    @property
    def ranks(self) -> int:
        """How many agents there are."""
        return len(rank_components(self.config))

    @property
    def agent_arguments(self) -> list[str]:
        """Arguments of the interpreter that make it a node agent."""
        agent = ["-m", "libra_hpc.agent.agent", "--run", str(self.run.path), "--attempt", str(self.attempt)]
        if self.from_step is not None:
            agent += ["--from-step", str(self.from_step)]
        return agent if self.arguments is None else list(self.arguments)

    @property
    def owner_arguments(self) -> list[str]:
        """Arguments of the run's owner (`libra_hpc.owner.owner`), whatever starts the ranks."""
        return ["--run", str(self.run.path), "--attempt", str(self.attempt), "--size", str(self.ranks)]

    @property
    def variables(self) -> dict[str, str]:
        """Variables the agents get, whatever starts them."""
        return agent_variables(self.config, self.environment)


def agent_variables(config: RunConfig, further: Mapping[str, str]) -> dict[str, str]:
    """Variables of a process on the nodes; with ``slurm.interface`` MPI, gloo and NCCL listen on it alone.

    PyPI's mpich uses UCX or libfabric, so both get a variable.  The equals sign keeps NCCL from taking the name as a
    prefix.
    """
    found: dict[str, str] = {}
    if interface := config.slurm.interface:
        found = dict.fromkeys(("UCX_NET_DEVICES", "FI_TCP_IFACE", "GLOO_SOCKET_IFNAME"), interface)
        found["NCCL_SOCKET_IFNAME"] = f"={interface}"
    return {**found, **config.compute.env, **further, "PYTHONUNBUFFERED": "1"}


def marked(options: Sequence[str], mark: str) -> list[str]:
    """sbatch options, of which the last comment has ``mark`` behind it: sbatch takes that one alone."""
    comments = [option.removeprefix(COMMENT) for option in options if option.startswith(COMMENT)]
    return [*options, COMMENT + ",".join([*comments[-1:], mark])]


def component_options(config: RunConfig, name: str, component: Component) -> dict[str, str]:
    """Where the nodes of a component come from and who pays for them: sbatch options without their dashes."""
    slurm, field = config.slurm, f"components.{name}"
    options = {key: _word(f"{field}.{key}", getattr(component, key)) for key in ("partition", *OPTIONAL)}
    for key in ("account", "qos"):
        options[key] = options[key] or _word(f"slurm.{key}", getattr(slurm, key))
    options |= {key: "" for key in OPTIONAL if options[key] == NO_OPTION}
    if component.gpus and not whole_nodes(config):
        kind = _word(f"{field}.gpu_type", component.gpu_type)
        spelling = _word("slurm.gpu_option", slurm.gpu_option).removeprefix("--")
        if not kind:
            spelling = spelling.replace("{type}:", "").replace("{type}", "")
        option, _, value = spelling.replace("{type}", kind).replace("{gpus}", str(component.gpus)).partition("=")
        options[option] = value
    # sbatch takes the last --gres alone.
    lists = [text.removeprefix(GRES) for _, text in _extras(config, name, component) if text.startswith(GRES)]
    options["gres"] = ",".join(filter(None, [options.get("gres", ""), *lists]))
    return {option: value for option, value in options.items() if value}


def memory_options(slurm: SlurmSection, mem: str, cpus: int = 1, gpus: int = 0) -> list[str]:
    """The sbatch option for the memory of a node with ``cpus`` and ``gpus`` of the job; empty where it has none."""
    option, share = slurm.mem_option, {"--mem-per-cpu": cpus, "--mem-per-gpu": gpus}.get(slurm.mem_option, 0)
    if mem not in ("", NO_OPTION) and option == "--mem":
        return [f"{option}={mem}"]
    # All memory of a node has no such spelling.
    size = int(memory_mb(mem or NO_OPTION) / share) if share else 0
    return [f"{option}={size}M"] if size else []


def node_options(config: RunConfig, group: HetGroup) -> list[str]:
    """sbatch options of one group of nodes."""
    component, tasks = group.component, group.first
    cpus = max(1, component.cpus // tasks)
    options = [
        f"--nodes={component.nodes}",
        f"--ntasks-per-node={tasks}",
        f"--cpus-per-task={cpus}",
        *memory_options(config.slurm, component.mem, cpus * tasks, component.gpus),
        f"--time={_word('slurm.time_limit', config.slurm.time_limit)}",
        # The job outlives a lost node: the agents notice and go on.
        "--no-kill",
        *(f"--{option}={value}" for option, value in component_options(config, group.name, component).items()),
    ]
    return options + extra_options(config, group.name, component)


def spot_options(config: RunConfig) -> list[str]:
    """sbatch options of a job of ``[borrow.spot]``: one node as those of the rollout component."""
    spot = config.borrow.spot
    own = with_resources(config, ()).components.rollout
    update = {"nodes": 1, "partition": spot.partition or own.partition, "qos": spot.qos or own.qos}
    group = HetGroup("rollout", msgspec.structs.replace(own, **update), ("rollout",))
    return node_options(config.changed(slurm={"time_limit": spot.time_limit}), group)


def extra_options(config: RunConfig, name: str, component: Component) -> list[str]:
    """The sbatch options that the run file gives verbatim for a component, but for GRES, which are among its own.

    Raises `UserError` for a reserved one, and for one that the component has already.
    """
    own, options = component_options(config, name, component), []
    for place, option in _extras(config, name, component):
        for key, spellings in SPELLINGS.items():
            if key in own and option.startswith(spellings):
                raise invalid(place, option, f"the job has --{key}={own[key]} already", f"components.{name}.{key}")
        if component.gpus and not whole_nodes(config) and re.match(rf"{GRES}(.*,)?gpu\b", option):
            raise invalid(place, option, "it asks for GPUs", f"components.{name}.gpus and slurm.gpu_option")
        if not option.startswith(GRES):
            options.append(option)
    return options


def _extras(config: RunConfig, name: str, component: Component) -> list[tuple[str, str]]:
    """Field and text of every option that `extra_options` looks at."""
    given = {"slurm.extra": config.slurm.extra, f"components.{name}.extra": component.extra}
    return [(place, option) for place, words in given.items() for option in joined(place, words)]


def named_cluster(config: RunConfig) -> str:
    """The cluster, or list of clusters, that ``slurm.extra`` names; empty: none."""
    return cluster_in(joined("slurm.extra", config.slurm.extra))


def given_options(config: RunConfig, components: Mapping[str, Component]) -> Iterator[tuple[str, str]]:
    """Field and text of every sbatch option that the run file gives verbatim for these components."""
    extras = {"slurm.extra": config.slurm.extra, **{f"components.{n}.extra": c.extra for n, c in components.items()}}
    return ((f"{field}[{i}]", option) for field, options in extras.items() for i, option in enumerate(options))


def _word(field: str, value: str) -> str:
    """``value`` if an sbatch option can contain it unquoted; else raises `UserError`."""
    if any(character.isspace() or character in "\"'\\#" or not character.isprintable() for character in value):
        raise invalid(field, value, "not usable in an sbatch option", "a name without spaces or quotes")
    return value


_KEYS = {
    "run.name": "--job-name -J",
    "components.*.nodes": "--nodes -N",
    "components.*.cpus": "--cpus-per-task -c",
    "components.*.gpus, and slurm.gpu_option": "--gpus -G --gpus-per-node --gpus-per-task --gpus-per-socket",
    "components.*.mem": "--mem",
    "slurm.mem_option": "--mem-per-cpu --mem-per-gpu",
    "components.*.partition": "--partition -p",
    "slurm.time_limit": "--time -t",
    "slurm.preempted": "--requeue --no-requeue",
    "no such option": "--signal --output -o --error -e --open-mode --ntasks -n --ntasks-per-node --array -a --parsable"
    " --wrap --wait -W --test-only --kill-on-invalid-dep --no-kill -k --chdir -D --help -h --usage --version -V",
}
RESERVED = {option: key for key, options in _KEYS.items() for option in options.split()}
"""Options that the script needs as they are, or that keep sbatch from queueing, and the key that sets them."""
_BARE = re.compile("[HIOQVWhksv]")
"""Short options without a value; all others of sbatch have one."""
_FLAGS = {
    *("contiguous", "exclusive", "get-user-env", "hold", "ignore-pbs", "nice", "no-bell", "oversubscribe"),
    *("overcommit", "quiet", "reboot", "share", "spread-job", "stepmgr", "use-min-nodes", "verbose"),
}
"""Long options whose value, if they take one, stands behind an equals sign."""


def joined(field: str, words: Sequence[str]) -> list[str]:
    """``words`` as one text an option: ``["-x", "a800-3"]`` becomes ``["-xa800-3"]``.

    Raises `UserError` for a word that belongs to no option, and for one of `RESERVED`.
    """
    found: list[str] = []
    open_option = False
    for index, word in enumerate(words):
        place = f"{field}[{index}]"
        if not word.startswith("-") and open_option and word.isprintable() and not word.startswith("="):
            found[-1] += f"={_one_word(place, word)}" if found[-1].startswith("--") else _one_word(place, word)
            open_option = False
            continue
        name, *_ = [*re.split(r"[=\s]", word, maxsplit=1), ""]
        if not re.fullmatch(r"-[A-Za-z].*|--[A-Za-z].*", name) or not word.isprintable():
            raise invalid(place, word, "not an sbatch option", "one option such as '--exclusive'")
        if any(character.isspace() for character in word):
            raise invalid(place, word, "it has a space", f"{name}=VALUE")
        names, open_option = _long(word) if word.startswith("--") else _short(word)
        for option in names:
            _refuse_reserved(place, word, option)
        found.append(word)
    return found


def _one_word(field: str, word: str) -> str:
    if any(character.isspace() for character in word):
        raise invalid(field, word, "it has a space", "a value without one")
    return word


def _refuse_reserved(field: str, word: str, option: str) -> None:
    # getopt takes a beginning of a long option for it; one of several options is not for a script to try.
    begun = [name for name in RESERVED if option.startswith("--") and name.startswith(option)]
    own = option if option in RESERVED else begun[0] if begun and option[2:] not in _FLAGS else ""
    if own:
        why = f"libra-hpc sets {own} itself"
        raise invalid(field, word, why if own == option else f"short for {own}, and {why}", RESERVED[own])


def _long(word: str) -> tuple[list[str], bool]:
    """Name of a long option, and whether the next word may be its value."""
    name, equals, _ = word.partition("=")
    return [name], not equals and name.removeprefix("--") not in _FLAGS


def _short(word: str) -> tuple[list[str], bool]:
    """Names of the short options that stand together in a word, and whether the next word may be a value."""
    names = []
    for place, letter in enumerate(word[1:], start=2):
        names.append(f"-{letter}")
        if not _BARE.match(letter):
            return names, place == len(word)
    return names, False
