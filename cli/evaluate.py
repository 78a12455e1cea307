"""`libra-hpc eval`: evaluate a policy on ``[[task.eval]]`` tables, in a job of rollout nodes without trainers.

- Task, engines and hosts are those of the run file; the policy is a checkpoint of the run, or any model folder.
- Everything is checked before the job is queued; a mistake leaves no folder.
- Its folder, below ``evaluations/`` of the run, has the result and the transcripts, and reads as a run's.
"""

from __future__ import annotations

import os
import shutil
import time
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from libra_hpc.config.job import EnvComponent
from libra_hpc.config.load import load_resolved
from libra_hpc.config.run import RunConfig
from libra_hpc.errors import OperationError, UserError, invalid
from libra_hpc.facts.rundir import MODES, RunDir, read_lines, readable
from libra_hpc.facts.summary import evaluation_results
from libra_hpc.preflight.checks import check_files
from libra_hpc.preflight.task_trial import try_task
from libra_hpc.process.lease import start_ticks
from libra_hpc.slurm.interpreter import check_python
from libra_hpc.slurm.launch import named_cluster
from libra_hpc.slurm.queue.command import slurm_environment
from libra_hpc.slurm.queue.job_record import JobRecord, new_mark, start_attempt, write_job
from libra_hpc.slurm.queue.query import cluster_name
from libra_hpc.slurm.single import Handle, answered, run_single, submit_on_nodes
from libra_hpc.state.saved_policies import LAST, chosen_policy

from . import jobs
from .check import load, warn
from .job_wait import wait_for
from .output import busy, print_json, print_line
from .runs import RUNS, JsonOption, RunsOption, find_run, is_run, job_id

JOB = "libra-eval"
NAME_CHARS = 60
"""Characters of tasks, and of steps, in the name of a folder. Half: many look alike; double: it is too long."""


def evaluate(
    what: Annotated[
        str, typer.Argument(metavar="RUN|FOLDER", help="A run or Hugging Face folder; or an evaluation to go on with.")
    ],
    task: Annotated[
        str, typer.Option("--task", metavar="NAME[,NAME]", help="Tables of task.eval by name; default: all.")
    ] = "",
    samples: Annotated[
        int | None, typer.Option("--samples", min=1, max=1024, metavar="N", help="Default: those of the table.")
    ] = None,
    step: Annotated[
        str | None, typer.Option("--step", metavar="N|best|last[,N]", help="Checkpoints of the run; default: last.")
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option("--file", metavar="RUN.toml", help="Run file of task and engines; default: the run's."),
    ] = None,
    nodes: Annotated[
        int | None, typer.Option("--nodes", min=1, metavar="N", help="Rollout nodes of the job; default: 1.")
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for the result and print it.")] = False,
    json: JsonOption = False,
    runs: RunsOption = Path(RUNS),
) -> None:
    run = evaluated_run(what, step, file, runs)
    if run is not None and (known := run.read_json(run.policies)):
        given = {"--task": task, "--step": step, "--file": file, "--samples": samples, "--nodes": nodes}
        place, config, policies = run, load_resolved(run.config), left_of(run, known, given)
    else:
        place = None
        config = load(file or Path(), ()) if run is None or file is not None else load_resolved(run.config)
        policies = {0: str(Path(what).absolute())} if run is None else chosen_policies(run, step or LAST)
        config = evaluation_config(config, task, samples, Path(next(iter(policies.values()))), nodes or 1)
    tasks = [part.name for part in config.task.eval]
    with busy("checking"):
        check_files(config)
        warnings = check_python(config)
        with try_task(config) as outcome:
            warnings = [*warnings, *outcome().warnings]
    warn(warnings)
    with readable(config.run.share):
        if place is None:
            parent = Path(config.run.dir) if run is None else run.path / "evaluations"
            place = new_folder(config, parent, policies)
        handle = queued(config, place, policies)
    facts: dict[str, Any] = {"tasks": tasks, "policies": policies, "path": str(place.path)}
    facts["job_id"] = handle.job_id
    if wait:
        facts["results"] = results_of(handle, place)
    if json:
        print_json(facts)
    elif wait:
        print_line("\n".join([*words_of(place), f"files in {place.path}"]))
    else:
        on, of = " and ".join(tasks), " and ".join(map(str, policies))
        print_line(f"job {handle.job_id} evaluates step {of} on {on}; its results will be in {place.evaluations}")


def words_of(place: RunDir) -> list[str]:
    """The results so far, as sentences."""
    return [result.words() for result in evaluation_results(place)]


def evaluated_run(what: str, step: str | None, file: Path | None, runs: Path) -> RunDir | None:
    """The run that ``what`` names; None for a model folder. Raises `UserError` where that lacks what it needs."""
    model = Path(what)
    if is_run(model) or not (model / "config.json").is_file():
        return find_run(what, runs)
    if step is not None:
        raise invalid("--step", step, f"{what} is a model folder", "a run, or no --step")
    if file is None:
        raise UserError(f"{what} is a model folder: --file RUN.toml names the task and the engines.")
    return None


def chosen_policies(run: RunDir, steps: str) -> dict[int, str]:
    """Folders of the policies that ``--step`` names, by step."""
    chosen = dict(chosen_policy(run, "--step", one.strip()) for one in steps.split(","))
    return {step: str(chosen[step]) for step in sorted(chosen)}


def left_of(place: RunDir, known: dict[str, Any], given: dict[str, Any]) -> dict[int, str]:
    """The policies of an evaluation that lack a result; raises `UserError` where none does, or an option is given."""
    for option, value in given.items():
        if value:
            raise invalid(option, str(value), f"{place.name} is an evaluation to go on with", f"no {option}")
    state = jobs.state(place)
    if not state.over:
        raise UserError(
            f"{place.name}: its job {job_id(place)} is {state.words}; its results are in {place.evaluations}."
        )
    tasks = len(load_resolved(place.config).task.eval)
    have = Counter(line["step"] for line in read_lines(place.evaluations))
    left = {int(step): policy for step, policy in known.items() if have[int(step)] < tasks}
    if not left:
        raise UserError(f"{place.name} has all its results, in {place.evaluations}.")
    start_attempt(place, 1)
    return dict(sorted(left.items()))


def results_of(handle: Handle, place: RunDir) -> list[dict[str, Any]]:
    """Wait for the job; returns its lines, raises `OperationError` where it has none."""
    wait_for(handle, lambda: words_of(place))
    error, lines = handle.of_task(0) or (f"Job {handle.job_id} ended as {handle.state().value}.", [])
    if error:
        raise OperationError(f"{error.rstrip('.')}; its files are in {place.path}.")
    found: list[dict[str, Any]] = lines
    return found


def evaluation_config(config: RunConfig, task: str, samples: int | None, policy: Path, nodes: int) -> RunConfig:
    """The configuration of the job: evaluations of ``policy`` on these tasks, on rollout nodes alone."""
    known = {part.name: part for part in config.task.eval}
    wanted = [name.strip() for name in task.split(",")] if task else list(known)
    if wrong := [name for name in wanted if name not in known] or ([] if wanted else [task]):
        raise invalid(
            "--task", wrong[0], "no such [[task.eval]]", list(known) or "a name of one; the run file has none"
        )
    parts = [
        msgspec.structs.replace(known[name], samples=samples or known[name].samples) for name in dict.fromkeys(wanted)
    ]
    tp, engines = config.rollout.on_node(config.components.hybrid.nodes)
    one = msgspec.structs.replace(config.components.rollout, nodes=nodes)
    return config.changed(
        model={"path": str(policy) if config.run.engine == "real" else config.model.path},
        task={"eval": parts},
        checkpoint={"best": ""},
        components={"rollout": one, "env": EnvComponent()},
        rollout={"tp": tp, "engines_per_node": engines},
    )


def evaluate_here(folder: str, policies: dict[int, str]) -> list[dict[str, Any]]:
    """The work of each node: a login node lacks its imports."""
    from libra_hpc.agent import evaluation_job

    return evaluation_job.evaluate(folder, list(policies.items()))


def new_folder(config: RunConfig, parent: Path, policies: dict[int, str]) -> RunDir:
    """Make the folder of an evaluation."""
    parent.mkdir(parents=True, exist_ok=True)
    names = ("+".join(part.name for part in config.task.eval), "+".join(map(str, policies)))
    place = RunDir.create(parent, "-step-".join(name[:NAME_CHARS] for name in names), MODES[config.run.share])
    place.write_config(config.as_data())
    place.write_json(place.policies, policies)
    return place


def queued(config: RunConfig, place: RunDir, policies: dict[int, str]) -> Handle:
    """Queue the job of an evaluation; the folder of a refused one goes, unless it has results."""
    local = config.slurm.executor == "local"
    env, mark = dict(os.environ) if local else slurm_environment(), new_mark()
    try:
        work, folder = (evaluate_here, str(place.path), policies), place.path / "job"
        limit = config.slurm.time_limit
        if local:
            handle = run_single(answered, *work, env=env, name=JOB, folder=folder, executor="local", time_limit=limit)
        else:
            handle = submit_on_nodes(
                answered,
                work,
                config,
                env,
                component="rollout",
                nodes=config.components.rollout.nodes,
                name=JOB,
                folder=folder,
                time_limit=limit,
                mark=mark,
            )
    except BaseException:
        if not place.evaluations.exists():
            shutil.rmtree(place.path, ignore_errors=True)
        raise
    if local:
        pid = int(handle.job_id)
        write_job(place, JobRecord("local", f"local-{pid}", 1, time.time(), pid=pid, started=start_ticks(pid) or 0))
    else:
        asked = named_cluster(config)
        cluster = asked or cluster_name(env)
        write_job(place, JobRecord("slurm", handle.job_id, 1, time.time(), cluster, bool(asked), name=JOB, mark=mark))
    return handle
