"""The task of a run file plays the start of one episode before anything is queued (`libra_hpc.host.trial`).

- The nodes' interpreter is here -> it plays beside the search for a split, at most `TRIAL_S` longer than that.  A
  mistake is refused with its sentence.
- The interpreter is inside a container or not visible here, or ``task.trial = false`` -> nothing is played.
- A step fails, the trial takes longer, or it cannot run here -> a warning: the nodes may differ.
- It passed before with these settings, tokenizer, data and Python files of the task's folder -> it passes.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
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


@contextlib.contextmanager
def try_task(config: RunConfig) -> Iterator[Callable[[], TaskTrial]]:
    """Play it beside other checks.

    The function given waits for the end, and raises `UserError` for a task that cannot play.
    """
    python = compute_python(config)
    if config.run.engine != "real" or not config.task.trial or in_container(config) or not os.access(python, os.X_OK):
        yield lambda: TaskTrial([], [])
        return
    passed = cache_folder() / "trials" / _digest(config, python)
    if (known := _remembered(passed)) is not None:
        yield lambda: known
        return
    with _playing(config, python) as ended:

        def outcome() -> TaskTrial:
            found = ended()
            if not found.warnings:
                with contextlib.suppress(OSError):
                    passed.parent.mkdir(parents=True, exist_ok=True)
                    write_atomic(passed, "\n".join(found.facts).encode())
            return found

        yield outcome


def _remembered(passed: Path) -> TaskTrial | None:
    try:
        return TaskTrial([], passed.read_text().splitlines())
    except (OSError, UnicodeDecodeError):
        return None


def _digest(config: RunConfig, python: str) -> str:
    task = config.task
    own = sorted(file for folder in {file.parent for file in task.code_files} for file in folder.glob("*.py"))
    sets = [Path(table.data) for _, table in task.tables.values() if table.data]
    data = [file for one in sets for file in (one, *sorted(one.glob("*")))]
    files = (*Path(config.model.path).glob("*.json*"), Path(config.model.path) / "chat_template.jinja", *own, *data)
    return digest((host_settings(config).decode(), python), files)


@contextlib.contextmanager
def _playing(config: RunConfig, python: str) -> Iterator[Callable[[], TaskTrial]]:
    """A process that plays, and how to wait for its outcome; it ends here at the latest."""
    with tempfile.TemporaryDirectory(prefix="libra-trial-") as folder:
        settings = Path(folder) / "host.json"
        write_private(settings, host_settings(config))
        command = [python, "-m", "libra_hpc.host.trial", "--socket", f"{folder}/none", "--config", str(settings)]
        none, pipe = subprocess.DEVNULL, subprocess.PIPE
        try:
            process = subprocess.Popen(command, stdin=none, stdout=pipe, stderr=pipe, text=True, errors="replace")
        except OSError as error:
            warned = _warned(config, f"its trial did not run ({error_text(error)})")
            yield lambda: warned
            return
        with process:
            try:
                yield lambda: _outcome(config, process)
            finally:
                process.kill()


def _outcome(config: RunConfig, process: subprocess.Popen[str]) -> TaskTrial:
    try:
        stdout, stderr = process.communicate(timeout=TRIAL_S)
    except subprocess.TimeoutExpired:
        return _warned(config, f"its trial took longer than {TRIAL_S:.0f} s; {SKIP}")
    lines = stderr.strip().splitlines() or [f"exit code {process.returncode}"]
    own = [line.removeprefix(MARK) for line in (*stdout.splitlines(), *lines) if line.startswith(MARK)]
    if process.returncode == UserError.exit_code and own:
        raise UserError(f"{own[-1].rstrip('.')}; {SKIP}.")
    if process.returncode:
        return _warned(config, f"its trial did not run ({lines[-1]})")
    facts = [line.removeprefix(FOUND) for line in stdout.splitlines() if line.startswith(FOUND)]
    return _warned(config, *own)._replace(facts=facts)


def _warned(config: RunConfig, *lines: str) -> TaskTrial:
    return TaskTrial([f"task.name = {config.task.name!r}: {line}" for line in lines], [])
