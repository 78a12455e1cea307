"""The task of a run file plays the start of one episode before anything is queued (`libra_hpc.host.trial`).

- The nodes' interpreter is here -> it plays, for at most `TRIAL_S`.  A mistake is refused with its sentence.
- The interpreter is inside a container or not visible here, or ``task.trial = false`` -> nothing is played.
- A step fails, the trial takes longer, or it cannot run here -> a warning: the nodes may differ.
- It passed before with these settings, tokenizer, data and Python files of the task's folder -> it passes.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

from libra_hpc.config.run import RunConfig
from libra_hpc.errors import UserError, error_text
from libra_hpc.files import cache_folder, write_atomic
from libra_hpc.host.settings import FOUND, MARK, host_settings, write_private
from libra_hpc.planning.remembered import digest
from libra_hpc.slurm.interpreter import compute_python, in_container

TRIAL_S = 10.0
"""Building a task that reads its data takes seconds.  Double: every `check` of a slow task waits so long."""
SKIP = "task.trial = false skips this trial"


class TaskTrial(NamedTuple):
    """What the trial of a task says, as sentences."""

    warnings: list[str]
    facts: list[str]


def try_task(config: RunConfig) -> TaskTrial:
    """Raise `UserError` for a task that cannot play."""
    python = compute_python(config)
    if config.run.engine != "real" or not config.task.trial or in_container(config) or not os.access(python, os.X_OK):
        return TaskTrial([], [])
    passed = cache_folder() / "trials" / _digest(config, python)
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return TaskTrial([], passed.read_text().splitlines())
    found = _played(config, python)
    if not found.warnings:
        with contextlib.suppress(OSError):
            passed.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(passed, "\n".join(found.facts).encode())
    return found


def _digest(config: RunConfig, python: str) -> str:
    task = config.task
    own = sorted(file for folder in {file.parent for file in task.code_files} for file in folder.glob("*.py"))
    sets = [Path(table.data) for _, table in task.tables.values() if table.data]
    data = [file for one in sets for file in (one, *sorted(one.glob("*")))]
    files = (*Path(config.model.path).glob("*.json*"), Path(config.model.path) / "chat_template.jinja", *own, *data)
    return digest((host_settings(config).decode(), python), files)


def _played(config: RunConfig, python: str) -> TaskTrial:
    with tempfile.TemporaryDirectory(prefix="libra-trial-") as folder:
        settings = Path(folder) / "host.json"
        write_private(settings, host_settings(config))
        command = [python, "-m", "libra_hpc.host.trial", "--socket", f"{folder}/none", "--config", str(settings)]
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=TRIAL_S
            )
        except subprocess.TimeoutExpired:
            return _warned(config, f"its trial took longer than {TRIAL_S:.0f} s; {SKIP}")
        except OSError as error:
            return _warned(config, f"its trial did not run ({error_text(error)})")
    lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
    own = [line.removeprefix(MARK) for line in (*done.stdout.splitlines(), *lines) if line.startswith(MARK)]
    if done.returncode == UserError.exit_code and own:
        raise UserError(f"{own[-1].rstrip('.')}; {SKIP}.")
    if done.returncode:
        return _warned(config, f"its trial did not run ({lines[-1]})")
    facts = [line.removeprefix(FOUND) for line in done.stdout.splitlines() if line.startswith(FOUND)]
    return _warned(config, *own)._replace(facts=facts)


def _warned(config: RunConfig, *lines: str) -> TaskTrial:
    return TaskTrial([f"task.name = {config.task.name!r}: {line}" for line in lines], [])
