"""`libra-hpc doctor`: whether this site has what a run needs, with a way out of each fault."""

from __future__ import annotations

import shutil
from typing import Annotated

import typer

from libra_hpc.agent.node_probe import probe
from libra_hpc.boxes.box_probe import TriedBox, tried, tried_all
from libra_hpc.boxes.providers import OTHERS
from libra_hpc.config.load import with_values
from libra_hpc.config.run import RunConfig
from libra_hpc.config.site import places
from libra_hpc.errors import OperationError, SlurmUnreachable, UserError
from libra_hpc.slurm.doctor import Finding, examine
from libra_hpc.slurm.queue.command import slurm_environment
from libra_hpc.slurm.single import submit_on_nodes

from . import jobs
from .check import site_config
from .env_verbs import NODE
from .job_wait import job_folder, on_a_node, wait_for
from .output import print_json, print_line, print_note, show, table
from .runs import JsonOption

TIME_LIMIT = "00:10:00"
"""Limit of the job. Two minutes are the rule; a cold file system needs several for the imports."""
MARKS = {"good": "ok", "warning": "?", "bad": "no"}


def doctor(
    submit: Annotated[
        bool, typer.Option("--submit", help="Queue a job of two train nodes that tries MPI, collectives and an engine.")
    ] = False,
    nodes: Annotated[int, typer.Option("--nodes", min=1, metavar="N", help="Nodes of that job.")] = 2,
    json: JsonOption = False,
) -> None:
    config = site_config()
    why = ""
    try:
        environment = slurm_environment()
    except SlurmUnreachable as error:
        environment, why = None, str(error).rstrip(".")
    found = examine(config, environment, why)
    box = tried(config.env)
    found.append(_boxed("box", box, "libra-hpc env probe --partition NAME tries a node"))
    if submit and environment is not None and not any(finding.state == "bad" for finding in found):
        found += on_nodes(config, environment, nodes)
        found += [on_an_env_node(config, box.sandbox)] if config.components.env.nodes else []
    bad = any(finding.state == "bad" for finding in found)
    files = [str(path) for path in places() if path.exists()]
    if json:
        print_json({"good": not bad, "site_files": files, "findings": [finding._asdict() for finding in found]})
    else:
        made = table("~", "what~", "found~", "to do~", box=None)
        for finding in found:
            made.add_row(MARKS[finding.state], finding.subject, finding.found, finding.fix)
        show(made)
        print_line(f"site profile: {', '.join(files) or 'none (libra-hpc init writes one)'}")
    if bad:
        raise typer.Exit(1)


def on_nodes(config: RunConfig, environment: jobs.Environment, nodes: int) -> list[Finding]:
    """Findings of a job on train nodes; its folder stays where something failed."""
    folder = job_folder(config, "doctor")
    handle = submit_on_nodes(
        probe,
        (config.slurm.device, config.slurm.interface, config.compute.local_dir, str(folder)),
        config,
        environment,
        component="train",
        nodes=nodes,
        name="libra-doctor",
        folder=folder,
        time_limit=TIME_LIMIT,
    )
    print_note(f"job {handle.job_id} tries {nodes} nodes (logs in {folder})")
    wait_for(handle)
    found: list[Finding] = []
    for task in range(nodes):
        answers = handle.of_task(task)
        found += [Finding(*answer) for answer in answers or ()]
        if answers is None:
            fix = f"read the logs in {folder}"
            found.append(Finding(f"node {task}", "bad", f"no answer; the job ended as {handle.state().value}", fix))
    if all(finding.state != "bad" for finding in found):
        shutil.rmtree(folder)
    return found


def on_an_env_node(config: RunConfig, sandbox: str) -> Finding:
    """What a job found of the box ``sandbox`` on a node of ``components.env``."""
    subject, there = "box of env nodes", with_values(config, NODE)
    try:
        tries = on_a_node(
            tried_all, config.env, config=there, component="env", name="libra-boxes", time_limit=TIME_LIMIT
        )
    except (UserError, OperationError) as error:
        return Finding(subject, "bad", str(error).rstrip("."), "libra-hpc env probe --partition NAME")
    box = next(one for one in map(TriedBox._make, tries) if one.sandbox == sandbox)
    return _boxed(subject, box, OTHERS)


def _boxed(subject: str, box: TriedBox, fix: str) -> Finding:
    good = Finding(subject, "good", f"{box.sandbox}: {box.cost}")
    return Finding(subject, "warning", box.why, fix) if box.why else good
