"""`libra-hpc make-policy`: make a tiny policy that can learn a task, in a small job."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from libra_hpc.config.learn import TaskTable
from libra_hpc.errors import invalid
from libra_hpc.preflight.named_files import check_task
from libra_hpc.user_file import absolute

from . import jobs
from .config_show import EXECUTORS, ExecutorOption
from .output import print_json, print_line
from .runs import JsonOption

WARM_START_STEPS = 2000
"""Optimizer steps of the supervised warm start: enough to copy keys reliably, in under a minute on one core."""


def make_policy(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to make; must not exist or be empty.")],
    task: Annotated[
        str, typer.Option("--task", metavar="FILE:CLASS", help="It has words and demonstrations: examples/keychain.py.")
    ],
    seed: Annotated[int, typer.Option("--seed", min=0, metavar="N", help="Same seed, same policy.")] = 0,
    steps: Annotated[
        int, typer.Option("--steps", min=0, metavar="N", help="Steps of the warm start.")
    ] = WARM_START_STEPS,
    executor: ExecutorOption = None,
    json: JsonOption = False,
) -> None:
    check_task("--task", task, TaskTable())
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise invalid("OUT", str(out), "exists already", "a new or empty folder")
    if executor not in (None, *EXECUTORS):
        raise invalid("--executor", executor, "unknown value", EXECUTORS)
    made = jobs.make_policy(out.absolute(), absolute("--task", task), seed, steps, executor=executor or "auto")
    # Without a warm start there is no loss to report.
    made = {name: value for name, value in made.items() if not (isinstance(value, float) and math.isnan(value))}
    if json:
        print_json({"path": str(out.absolute()), "task": task, "seed": seed, **made})
    else:
        print_line(
            f"made {out}: "
            + ", ".join(
                f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}" for name, value in made.items()
            )
        )
