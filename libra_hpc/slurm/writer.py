"""The batch script of a run: a pure function of a `Launch`, and its template and set-up lines.

The script is one job, heterogeneous with one component per kind of node, or plain (`het_groups`); one task per node.
`srun` starts all node agents.  Options are checked (`launch`); other values are quoted here.

- The time limit is near (`fit.notice_s`) -> the agents get SIGUSR1.
- The job is cancelled or preempted -> the agents get SIGTERM.
- A rank prints -> ``agent-<rank>.log``; it writes to descriptor `OUTPUT_FD` -> Slurm's own output.
- The script becomes the run's owner (`libra_hpc.owner.owner`), which starts the ranks and decides what follows.
"""

from __future__ import annotations

import math
import re
import shlex
import sys
from collections.abc import Collection, Mapping, Sequence
from importlib import resources
from itertools import chain, takewhile
from pathlib import Path
from typing import Any

import jinja2

from libra_hpc.config.run import RunConfig
from libra_hpc.errors import error_text, invalid
from libra_hpc.process.agent_folders import COMPILED
from libra_hpc.process.code_stamp import STAMP, code_stamp
from libra_hpc.protocol.ranks_stop import OUTPUT, OUTPUT_FD
from libra_hpc.slurm.queue.cause import SET_UP_ENDED

from .fit import notice_s
from .interpreter import in_container, start_command
from .launch import Launch, NodeRequest, agent_variables, marked, spot_options

STEP = "step"
"""File in the log folder with the number of the step that the ranks are."""
RANK_STARTER = ("-m", "libra_hpc.slurm.rank")
"""Arguments that start a rank."""


def het_script(launch: Launch) -> str:
    """The sbatch script of a launch; raises `UserError` for a template that cannot make one."""
    config, run, (first, *others) = launch.config, launch.run, launch.request.groups
    groups = [first._replace(options=marked(first.options, launch.mark)), *others]
    logs, started = run.logs(launch.attempt), start_command(config, run.path, named=True)
    # Slurm's commands are outside a container, and so is the owner.
    python = sys.executable if in_container(config) else launch.python
    slurm = ["--slurm", "--nodes", *(str(group.used) for group in groups)]
    owner = shlex.join([python, "-m", "libra_hpc.owner.owner", *launch.owner_arguments, *slurm])
    ours = {OUTPUT: str(OUTPUT_FD)}
    ours |= {STAMP: code_stamp()} if in_container(config) else {}
    return script_text(
        config.slurm.template,
        groups=groups,
        common=[
            f"--job-name={config.run.name}",
            # Slurm expands % in file names; doubled it stands for itself.
            f'--output="{str(logs / "slurm.out").replace("%", "%%")}"',
            "--open-mode=append",
            f"--signal=B:USR1@{math.ceil(notice_s(config.slurm))}",
            "--requeue" if config.slurm.preempted == "requeue" else "--no-requeue",
            *([f"--dependency=afterany:{launch.after}"] if launch.after else []),
            *launch.request.mail,
        ],
        set_up=set_up_lines(
            config, {**launch.variables, **ours}, f'exec {owner} --unprepared "$cause"', local_exports(config)
        ),
        local_dir=config.compute.local_dir,
        parts=step_parts(groups),
        # A lost rank or node ends nothing else (-K0 -W0 --no-kill).
        step_options=[
            "--export=ALL",
            "--mpi=none",
            *("--no-kill", "-K0", "-W0", "--mem=0", "--cpu-bind=none"),
            *map(shlex.quote, started.step),
        ],
        log_prefix=shlex.quote(str(logs / "agent-")),
        command=shlex.join([*started.prefix, launch.python, *RANK_STARTER, *launch.agent_arguments]),
        output=OUTPUT_FD,
        step=shlex.quote(str(logs / STEP)),
        owner=owner,
    )


def spot_script(launch: Launch) -> str:
    """The script of a job of one node that joins the running job (``[borrow.spot]``)."""
    config, run = launch.config, launch.run
    started = start_command(config, run.path, named=False)
    join = [*started.prefix, launch.python, "-m", "libra_hpc_cli.app", "join", str(run.path), "--spot"]
    step = ["srun", "--ntasks=1", "--export=ALL", "--mem=0", "--cpu-bind=none", *started.step] if started.step else []
    options = [
        f"--job-name={config.run.name}-spot",
        f'--output="{str(run.logs(launch.attempt) / "spot-").replace("%", "%%")}%j.out"',
        "--no-requeue",
        *marked(spot_options(config), launch.mark),
    ]
    lines = set_up_lines(config, agent_variables(config, {}), first=local_exports(config))
    lines += [f'mkdir -pm 700 "{CACHE_FOLDER}"'] if config.compute.local_dir else []
    head = ["#!/bin/bash", *(f"#SBATCH {option}" for option in options)]
    return "\n".join([*head, *lines, shlex.join(["exec", *step, *join]), ""])


def step_parts(groups: Sequence[NodeRequest]) -> list[list[str]]:
    """Options of each part of the step.  Tasks go in rank order over the nodes, the first of which gets what is left.

    A heterogeneous job has the tasks of each component from its request; where only the first node has one more, the
    first component is a part by itself.
    """
    counts = [f"--nodes={groups[0].used}", f"--ntasks={groups[0].tasks}", "--distribution=block"]
    if len(groups) == 1:
        return [counts]
    everyone = [str(index) for index in range(len(groups))]
    if groups[0].used in (1, groups[0].tasks) and groups[0].used == groups[0].nodes:
        return [["--het-group=" + ",".join(everyone)]]
    return [["--het-group=0", *counts], ["--het-group=" + ",".join(everyone[1:])]]


def on_nodes(command: Sequence[str], nodes: Sequence[int], more: int, without: Collection[str] = ()) -> list[str]:
    """A step's command line for so many nodes of each component, the first of which has ``more`` ranks than nodes, and
    for none of ``without``."""
    end, own = command.index("bash"), ("--het-group=", "--nodes=", "--ntasks=", "--distribution=")
    options = [one for one in takewhile(":".__ne__, command[1:end]) if not one.startswith(own)]
    options += ["--exclude=" + ",".join(sorted(without))] if without else []
    groups = [[f"--het-group={index}"] for index in range(len(nodes))] if len(nodes) > 1 else [[]]
    parts = [
        [":", *options, *group, f"--nodes={count}", f"--ntasks={tasks}", "--distribution=block"]
        for group, count, tasks in zip(groups, nodes, [nodes[0] + more, *nodes[1:]], strict=True)
    ]
    return [command[0], *[*chain(*parts)][1:], *command[end:]]


def script_text(site: str, **values: Any) -> str:
    """The batch script, from the template at ``site``; empty: from the built-in one.

    Raises `UserError` where the template cannot be read or rendered.
    """
    source = Path(site) if site else resources.files("libra_hpc_sbatch").joinpath("run.sbatch.j2")
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    try:
        script = environment.from_string(source.read_text()).render(values)
        if script.startswith("#!") and values["owner"] in script:
            return script
        why = "its script does not begin with '#!', or does not start {{ owner }}"
    except (OSError, ValueError) as error:
        why = f"it cannot be read ({error_text(error)})"
    except Exception as error:  # an expression of the site's may raise anything
        line = f"line {error.lineno}: " if isinstance(error, jinja2.TemplateSyntaxError) else ""
        why = f"{line}{error}".rstrip(".")
    raise invalid("slurm.template", site, why, "a copy of sbatch/run.sbatch.j2 with further lines")


_VARIABLE = re.compile(r"\$(?:(\$)|\{([A-Za-z_]\w*)\}|([A-Za-z_]\w*))")
"""``$NAME``, ``${NAME}``, and ``$$`` for a dollar sign.  Every other dollar sign stands for itself."""
CACHES = {
    "CUDA_CACHE_PATH": "cuda",
    "DG_JIT_CACHE_DIR": "deep_gemm",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "TILELANG_CACHE_DIR": "tilelang",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TORCH_EXTENSIONS_DIR": "extensions",
    "TRITON_CACHE_DIR": "triton",
    "TVM_FFI_CACHE_DIR": "tvm-ffi",
    "VLLM_CACHE_ROOT": "vllm",
}
"""Variables of compilers, and their folders in one for all.  By default all nodes share those of the home."""
CACHE_FOLDER = "$TMPDIR/cache-$UID"
"""Made with mode 0700 before an agent starts, which looks whose it is (`libra_hpc.process.agent_folders`)."""
STRICT = """\
# The first command below that fails, or leaves the script, ends the start and is named as its cause.
set -eo pipefail
set_up_command=
set_up_ended() {{
  code=$?
  trap - DEBUG EXIT
  # By a signal: Slurm has the reason.
  case $code in 138 | 143) exit "$code" ;; esac
  cause="{failed} '$set_up_command' with exit code $code (compute.setup, compute.env)"
  echo "$cause" >&2
  {end}
}}
trap 'set_up_command=$BASH_COMMAND' DEBUG
trap set_up_ended EXIT
trap 'trap - EXIT; exit 143' TERM
trap 'trap - EXIT; exit 138' USR1"""
LOGIN_SHELL = 'shopt -q login_shell || exec bash -l "$0" "$@"  # It reads /etc/profile and the like.'
BODY = """\
# Without -u: `module` and `conda activate` read variables that are not set.
set +u"""


def set_up_lines(
    config: RunConfig, variables: Mapping[str, str], end: str = "exit 1", first: Sequence[str] = ()
) -> list[str]:
    """Lines of bash: ``compute.setup``, then the exports ``first`` and those of ``variables``.

    ``end``: a command that ends the script after a failure, whose cause is in ``$cause``: a line fails or leaves the
    script, a variable is not set on the node, or a signal comes.
    """
    setup, login = config.compute.setup, [LOGIN_SHELL] if config.slurm.login_shell else []
    exports = [*first, *(f"export {name}={shell_text(value)}" for name, value in sorted(variables.items()))]
    if not setup and not any("$" in line for line in exports):
        return [*login, *exports]
    body = [*BODY.splitlines(), *setup, "set -u"] if setup else ["set -u"]
    strict = STRICT.format(failed=SET_UP_ENDED, end=end).splitlines()
    return [*login, *strict, *body, *exports, "trap - DEBUG EXIT TERM USR1"]


def local_exports(config: RunConfig) -> list[str]:
    """Lines that put temporary files into ``compute.local_dir``, and caches there or into ``compute.cache_dir``; a
    cache that has a place keeps it.

    Caches have code, so their folder is of one user (`CACHE_FOLDER`).
    """
    local, shared = config.compute.local_dir, config.compute.cache_dir
    lines = [f'export TMPDIR="{local}"'] if local else []
    lines += [f'export {COMPILED}="{shared}"'] if shared else []
    folder = f"${COMPILED}" if shared else CACHE_FOLDER
    caches = [f'export {name}="${{{name}:-{folder}/{own}}}"' for name, own in CACHES.items()]
    return [*lines, *caches] if lines else []


def shell_text(text: str) -> str:
    """A value as bash reads it: its variables are expanded there, all else stands for itself."""
    if not _VARIABLE.search(text):
        quoted = shlex.quote(text)
        # ``==`` looks like a test.
        return f"'{text}'" if text.startswith("=") and quoted == text else quoted
    made, place = [], 0
    for found in _VARIABLE.finditer(text):
        made.append(re.sub(r'([\\"$`])', r"\\\1", text[place : found.start()]))
        made.append(r"\$" if found[1] else f"${{{found[2] or found[3]}}}")
        place = found.end()
    made.append(re.sub(r'([\\"$`])', r"\\\1", text[place:]))
    return f'"{"".join(made)}"'


def expanded(variables: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, str]:
    """``variables`` as `set_up_lines` exports them, for a start without a script; raises `UserError` for a variable
    that is not set."""
    known = dict(environ)
    for name, text in sorted(variables.items()):
        for found in _VARIABLE.finditer(text):
            wanted = found[2] or found[3]
            if wanted and wanted not in known:
                raise invalid(f"compute.env.{name}", text, f"${wanted} is not set here", "variables that are set")
        known[name] = _VARIABLE.sub(lambda found: "$" if found[1] else known[found[2] or found[3]], text)
    return {name: known[name] for name in variables}
