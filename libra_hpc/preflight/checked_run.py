"""The one validation of a run file: `check` returns a `CheckedRun`, which every later step takes as it is.

1. The files that it names, what its tasks say about their work (`known_work`), the interpreter of the nodes, and rows
   of evaluations.
2. The split, where the planner chooses it (`planning.initial`); meanwhile the start of one episode (`task_trial`).
3. Fields, model and GPU memory (`checks`).
4. With Slurm: CPUs and memory of the nodes, and warnings of what it may refuse (`slurm.fit`).
5. Host memory, the sbatch options (`slurm.launch`), and a site's template of the script.

Nothing is written or queued.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from libra_hpc.config.node_groups import het_groups
from libra_hpc.config.run import RunConfig
from libra_hpc.errors import SlurmUnreachable, invalid
from libra_hpc.facts.rundir import RunDir
from libra_hpc.files import cache_folder
from libra_hpc.models.host_memory import HostRoom
from libra_hpc.slurm.fit import doubts, waits, with_resources
from libra_hpc.slurm.interpreter import check_container, check_python
from libra_hpc.slurm.launch import JobRequest, Launch, job_request, named_cluster
from libra_hpc.slurm.queue.command import WAYS_OUT, slurm_environment
from libra_hpc.slurm.queue.query import Partition, on_cluster, partitions
from libra_hpc.slurm.writer import het_script

from .checks import check_files, check_run
from .gpu_memory import MemoryNeed
from .host_memory_needs import check_boxes, check_hosts, fitted, host_needs, node_rooms, with_caches, with_packs
from .idle_keys import IDLE, idle_keys
from .job_checks import idle_seats, rounded_adapters
from .known_work import known_work
from .named_files import naming
from .task_trial import check_overlap, try_task

if TYPE_CHECKING:
    from libra_hpc.boxes.box_probe import TriedBox
    from libra_hpc.planning.initial import InitialPlan


@dataclass(frozen=True)
class CheckedRun:
    """A run file that passed every check, and what the checks found."""

    request: JobRequest
    plan: InitialPlan | None
    """The plan behind the split; None where the split is explicit."""
    environment: Mapping[str, str] | None
    """Environment of Slurm's commands; None for the local executor, or when no Slurm answers."""
    memory: list[MemoryNeed]
    """GPUs first, then nodes with their /dev/shm."""
    warnings: list[str]
    facts: list[str]
    """Sentences: what the trial of the task found, and whether a synchronous run trains whole batches."""

    @property
    def config(self) -> RunConfig:
        """With its split, and where Slurm answers the CPUs and memory of every component."""
        return self.request.config

    def launch(self, run: RunDir, attempt: int, after: str = "", from_step: int | None = None) -> Launch:
        """One attempt of it, from the step that was asked for; ``after``: Slurm job that must have ended."""
        return Launch(self.request, run, attempt, after=after, from_step=from_step)


def check(config: RunConfig, *, slurm_required: bool, report: Callable[[str], None] = lambda what: None) -> CheckedRun:
    """Fill in what the run file leaves open and run every check; raises the first mistake.

    ``slurm_required``: raise `SlurmUnreachable` when a Slurm is needed and none answers. ``report`` gets what goes on.
    """
    check_files(config)
    config = known_work(config)
    warnings, plan = [*check_python(config), *check_overlap(config.task)], None
    with try_task(config) as outcome:
        if config.components.split == "auto":
            plan = _planned(config, report)
            config = plan.config
        shape, gpus = check_run(config)
        report("trying the task")
        trial = outcome()
        report("checking")
    warnings += [*trial.warnings, *gpus.warnings, *rounded_adapters(config)]
    environment = _slurm(config, required=slurm_required)
    known: list[Partition] = []
    warnings += check_container(config, environment)
    if environment is not None:
        known = partitions(environment, "--all", *on_cluster(named_cluster(config)))
        config = with_resources(config, known)
        warnings += waits(config, known)
        warnings += [str(invalid(*doubt)).rstrip(".") for doubt in doubts(config, known, named=True)]
    boxes = _boxes(config)
    warnings += [str(idle).rstrip(".") for idle in idle_keys(config, IDLE)]
    warnings += [*idle_seats(config), *(f"{box.why.rstrip('.')}, and on the nodes it may" for box in boxes if box.why)]
    hosts, given = [], config
    if shape is not None:
        config = with_caches(with_packs(config, shape, known), shape, known)
        hosts = host_needs(config, shape, known)
    warnings += [*check_hosts(hosts), *(check_boxes(config, hosts, known) if boxes else ())]
    memory = [*gpus.needs, *(need for host in hosts for need in host.needs)]
    request = job_request(config)
    _check_template(request)
    facts = [
        config.engine_words,
        *trial.facts,
        *_unboxed(config),
        *(f"boxes here: {box.sandbox}, {box.cost}" for box in boxes if not box.why),
    ]
    facts += filter(None, [config.unstreamed, *fitted(given, config)])
    return CheckedRun(request, plan, environment, memory, warnings, facts)


def _check_template(request: JobRequest) -> None:
    """Raise `UserError` where the site's template has a mistake."""
    config = request.config
    if config.slurm.template and config.slurm.executor != "local":
        het_script(Launch(request, RunDir(config.run.dir), 1))


def _planned(config: RunConfig, report: Callable[[str], None]) -> InitialPlan:
    # With the simulator, which only this needs.
    from libra_hpc.planning.initial import initial_plan

    with naming(config):
        return initial_plan(
            config,
            progress=lambda plays: report(f"playing plans: {plays}"),
            cache=cache_folder(),
            rooms=known_rooms(config),
        )


def _boxes(config: RunConfig) -> list[TriedBox]:
    """The box of this machine, if an agent of the run is a program."""
    if config.run.engine != "real" or not any(one.command or one.agent for _, one in config.task.tables.values()):
        return []
    from libra_hpc.boxes.box_probe import tried

    return [tried(config.env)]


def _unboxed(config: RunConfig) -> list[str]:
    """A fact about each task of verifiers."""
    tasks = [str(one.verifiers["taskset"]) for _, one in config.task.tables.values() if one.verifiers]
    return [
        f"programs of {one} run with your rights, in no box: of [env] they have limits.wall_s and unenforced alone"
        for one in tasks
    ]


def known_rooms(config: RunConfig) -> Mapping[str, HostRoom]:
    """Host memory of the nodes of each component, where each has nodes of its own."""
    apart = config.slurm.executor != "local" and not config.components.one_node
    if config.run.engine != "real" or config.slurm.device == "cpu" or not apart:
        return {}
    environment = _slurm(config, required=False)
    known = [] if environment is None else partitions(environment, "--all", *on_cluster(named_cluster(config)))
    return node_rooms(with_resources(config, known) if known else config, known)


def _slurm(config: RunConfig, *, required: bool) -> Mapping[str, str] | None:
    """Environment of Slurm's commands; the error proposes a run without Slurm where this machine has the GPUs."""
    if config.slurm.executor == "local":
        return None
    try:
        return slurm_environment()
    except SlurmUnreachable as error:
        if not required:
            return None
        real = config.run.engine == "real" and config.slurm.device == "cuda"
        needed = sum(group.component.nodes * group.component.gpus for group in het_groups(config)) if real else 0
        here = gpus_here()
        way = f"{WAYS_OUT}, or run without Slurm with `--executor local`"
        if needed > here:
            way = f"submit where `sinfo` answers: the run needs {needed} GPUs, and this machine has {here}"
        raise SlurmUnreachable(str(error).replace(WAYS_OUT, way)) from error


def gpus_here() -> int:
    """GPUs of this machine."""
    return sum(path.name.removeprefix("nvidia").isdigit() for path in Path("/dev").glob("nvidia*"))
