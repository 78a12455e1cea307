"""Run one function on a node of the site profile, and wait: state on stderr; Ctrl-C cancels the job."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from libra_hpc.config.run import RunConfig
from libra_hpc.errors import OperationError, invalid
from libra_hpc.slurm.interpreter import check_python
from libra_hpc.slurm.queue.command import slurm_environment
from libra_hpc.slurm.single import Handle, answered, submit_on_nodes

from .output import busy, print_note

POLL_S = 0.5


def on_a_node(
    function: Callable[..., Any], *arguments: Any, config: RunConfig, component: str, name: str, time_limit: str
) -> Any:
    """What ``function(*arguments)`` returns on a node of ``component``; its folder stays where something failed.

    Raises `UserError` when Slurm refuses the job, `OperationError` when it or the function fails.
    """
    environment = slurm_environment()
    for warning in check_python(config):
        print_note(f"warning: {warning}")
    folder = job_folder(config, name)
    try:
        handle = submit_on_nodes(
            answered,
            (function, *arguments),
            config,
            environment,
            component=component,
            nodes=1,
            name=name,
            folder=folder,
            time_limit=time_limit,
        )
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    print_note(f"job {handle.job_id} on a {component} node (logs in {folder})")
    wait_for(handle)
    answer = handle.of_task(0)
    if answer is None:
        raise OperationError(f"Job {handle.job_id} ended as {handle.state().value} without a result; logs in {folder}.")
    error, value = answer
    if error:
        raise OperationError(error)
    shutil.rmtree(folder, ignore_errors=True)
    return value


def job_folder(config: RunConfig, name: str) -> Path:
    """A new hidden folder beside the runs, where every node sees it; raises `UserError` where none can be made."""
    parent = Path(config.run.dir)
    try:
        parent.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=f".{name}-", dir=parent))
    except OSError as error:
        why = f"no folder can be made there ({error.strerror})"
        raise invalid("run.dir", str(parent), why, "a writable folder") from error


def wait_for(handle: Handle, news: Callable[[], Sequence[str]] = tuple) -> None:
    """Return when the job has ended, in whatever way; an interrupt cancels it first.

    ``news``: sentences about it so far.
    """
    printed, known = "", 0
    try:
        with busy("waiting for the job"):
            while not handle.done():
                state = handle.state().value.lower()
                if state != printed:
                    print_note(f"job {handle.job_id}: {state}")
                    printed = state
                for sentence in (found := news())[known:]:
                    print_note(sentence)
                known = len(found)
                time.sleep(POLL_S)
    except KeyboardInterrupt:
        handle.cancel()
        print_note(f"job {handle.job_id} is cancelled")
        raise
