"""What users wrote is tried before anything is queued.

- The task plays the start of one episode (`libra_hpc.host.trial`), whose prompt fits into the context.
- Functions of files for advantages and loss are called once on made-up values.

- The nodes' interpreter is here -> it plays beside the search for a split, with at most `CPU_S` of computing and
  `WALL_S` in all.  A mistake is refused with its sentence.
- The interpreter is inside a container or not visible here, or ``task.trial = false`` -> nothing is played.
- A step fails, the trial takes longer, or it cannot run here -> a warning: the nodes may differ.
- It passed before with these settings, tokenizer, data and Python files of the task's folder -> it passes.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from libra_hpc.config.learn import EvalPart, TaskSection, TaskTable
from libra_hpc.config.run import RunConfig
from libra_hpc.errors import UserError, error_text, invalid
from libra_hpc.files import cache_folder, digest, write_atomic
from libra_hpc.host.settings import FOUND, MARK, PROMPT, made_from, write_private
from libra_hpc.slurm.interpreter import compute_python, in_container
from libra_hpc.tasks.data_task import Rows, open_rows
from libra_hpc.user_file import file_of

CPU_S = 10
"""Seconds of computing, on a busy machine as on a quiet one: building a task that reads its data takes some.  Double:
every `check` of a slow task waits so long."""
WALL_S = 600.0
"""For all of it.  Half: a machine that does twenty things at once leaves a mistake unseen; double: a task that waits
for a server of the cluster holds `check` up for twenty minutes."""
SKIP = "task.trial = false skips this trial"
CALL = f"""
import importlib, sys
from libra_hpc.errors import UserError
module, function, name = sys.argv[1:]
try:
    getattr(importlib.import_module(module), function)(name)
    print({PROMPT + "1"!r})
except UserError as error:
    print({MARK!r} + str(error))
    sys.exit(UserError.exit_code)
"""
FUNCTIONS = {
    "advantage": ("libra_hpc.policies.learning.advantages", "try_advantage"),
    "loss": ("libra_hpc.trainer.losses", "try_loss"),
}
"""Key of ``[algorithm]`` -> what calls the function that it names."""


class TaskTrial(NamedTuple):
    """The findings of a task's trial, as sentences."""

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
    model = (*Path(config.model.path).glob("*.json*"), Path(config.model.path) / "chat_template.jinja")
    named = {name: file for name in _functions(config).values() if (file := file_of(name)) is not None}
    limits = config.deadlines.first_s, config.rollout.max_model_len
    asked = (made_from(config), python, list(named), limits)
    return digest(asked, (*model, *own, *data, *named.values()))


def _functions(config: RunConfig) -> dict[str, str]:
    """Functions of files that the run file names, by the key of ``[algorithm]``."""
    named = {key: str(getattr(config.algorithm, key)) for key in FUNCTIONS}
    return {key: name for key, name in named.items() if ":" in name}


@contextlib.contextmanager
def _playing(config: RunConfig, python: str) -> Iterator[Callable[[], TaskTrial]]:
    """Processes that play and call, and how to wait for their outcome; they end here at the latest."""
    with tempfile.TemporaryDirectory(prefix="libra-trial-") as folder, contextlib.ExitStack() as stack:
        settings = Path(folder) / "host.json"
        write_private(settings, msgspec.json.encode(config))
        play = ["-m", "libra_hpc.host.trial", "--socket", "0", "--config", str(settings)]
        calls = {f"algorithm.{key}": ["-c", CALL, *FUNCTIONS[key], name] for key, name in _functions(config).items()}
        none, pipe, environment = subprocess.DEVNULL, subprocess.PIPE, {**os.environ, "TMPDIR": folder}
        started: dict[str, subprocess.Popen[str] | str] = {}
        for field, arguments in {"task.name": play, **calls}.items():
            command = [python, *arguments]
            try:
                process = subprocess.Popen(
                    command, env=environment, stdin=none, stdout=pipe, stderr=pipe, text=True, errors="replace"
                )
            except OSError as error:
                started[field] = f"its trial did not run ({error_text(error)})"
                continue
            started[field] = stack.enter_context(process)
            stack.callback(process.kill)
            with contextlib.suppress(OSError):
                # The kernel ends it with SIGXCPU, which is to leave no core file.
                resource.prlimit(process.pid, resource.RLIMIT_CORE, (0, 0))
                resource.prlimit(process.pid, resource.RLIMIT_CPU, (CPU_S, 2 * CPU_S))
        ends_at = time.monotonic() + WALL_S
        yield lambda: _together(
            [
                _warned(config, field, one) if isinstance(one, str) else _outcome(config, field, one, ends_at)
                for field, one in started.items()
            ]
        )


def _together(trials: list[TaskTrial]) -> TaskTrial:
    return TaskTrial([one for trial in trials for one in trial.warnings], [one for t in trials for one in t.facts])


def _outcome(config: RunConfig, field: str, process: subprocess.Popen[str], ends_at: float) -> TaskTrial:
    try:
        stdout, stderr = process.communicate(timeout=ends_at - time.monotonic())
    except subprocess.TimeoutExpired:
        return _warned(config, field, f"its trial took longer than {WALL_S:.0f} s; {SKIP}")
    if process.returncode == -signal.SIGXCPU:
        return _warned(config, field, f"its trial computed for more than {CPU_S} s; {SKIP}")
    lines = stderr.strip().splitlines() or [f"exit code {process.returncode}"]
    own = [line.removeprefix(MARK) for line in (*stdout.splitlines(), *lines) if line.startswith(MARK)]
    if process.returncode == UserError.exit_code and own:
        raise UserError(f"{own[-1].rstrip('.')}; {SKIP}.")
    if process.returncode:
        return _warned(config, field, f"its trial did not run ({lines[-1]})")
    facts = [line.removeprefix(FOUND) for line in stdout.splitlines() if line.startswith(FOUND)]
    tokens = max((int(line.removeprefix(PROMPT)) for line in stdout.splitlines() if line.startswith(PROMPT)), default=0)
    if not tokens:
        why = "its file ended the process that tried it, or closed its output"
        raise UserError(f"{field} = {_named(config, field)!r}: {why}; {SKIP}.")
    if tokens >= (room := config.rollout.max_model_len):
        why = f"the first prompt of {config.task.name!r} has {tokens} tokens"
        raise invalid("rollout.max_model_len", room, why, f"an integer above {tokens}")
    return _warned(config, field, *own)._replace(facts=facts)


def _warned(config: RunConfig, field: str, *lines: str) -> TaskTrial:
    return TaskTrial([f"{field} = {_named(config, field)!r}: {line}" for line in lines], [])


def _named(config: RunConfig, field: str) -> object:
    section, key = field.split(".")
    return getattr(getattr(config, section), key)


class _Prompts(NamedTuple):
    rows: Rows
    digests: list[bytes]
    """Digests of each row, in order; empty for a row without prompt."""


def check_overlap(task: TaskSection) -> list[str]:
    """Raise `UserError` for a prompt that is trained on and evaluated; returns warnings.

    Prompts are compared by digest: text as it is; one message of the user as its text. Data that only a task of its
    own can read, or that need pyarrow where it is not installed, are not compared.
    """
    parts = {key: (name, table) for key, (name, table) in task.tables.items() if table.data}
    if len({_evaluated(key) for key in parts}) < 2:
        return []
    warnings: list[str] = []
    opened = {key: found for key, part in parts.items() if (found := _opened(key, *part, warnings)) is not None}
    places: dict[bytes, tuple[str, int]] = {}
    for key in filter(_evaluated, opened):
        _check_rows(key, parts[key][1], len(opened[key].rows))
        for number, row in enumerate(opened[key].digests):
            places.setdefault(row, (key, number))
    places.pop(b"", None)
    for trained in (found for key, found in opened.items() if not _evaluated(key)):
        at = next((number for number, digest in enumerate(trained.digests) if digest in places), None)
        if at is not None:
            key, own = places[trained.digests[at]]
            why = f"the prompt of {opened[key].rows.place(own)} is trained on, at {trained.rows.place(at)}"
            raise invalid(_field(key), parts[key][1].data, why, "rows of its own")
    return warnings


def _check_rows(key: str, table: TaskTable, rows: int) -> None:
    if isinstance(table, EvalPart) and table.prompts > rows:
        raise invalid(
            f"{key.rpartition('.')[0]}.prompts", table.prompts, f"its data have {rows} rows", f"at most {rows}"
        )


def _evaluated(key: str) -> bool:
    return key.startswith("task.eval.")


def _field(key: str) -> str:
    """``key`` names the table's class."""
    return f"{key.rpartition('.')[0]}.data"


def _opened(key: str, name: str, table: TaskTable, warnings: list[str]) -> _Prompts | None:
    """Rows of a table; None where they cannot be compared."""
    try:
        rows = open_rows(table.data, _field(key))
        return _Prompts(rows, [_prompt_digest(prompt) for prompt in rows.column(table.prompt or "prompt")])
    except UserError as error:
        if name == "data" and not isinstance(error.__cause__, ImportError):
            raise
        warnings.append(f"rows of evaluations and training are not compared: {error}")
        return None


def _prompt_digest(prompt: Any) -> bytes:
    match prompt:
        case [{"role": "user", "content": str(text)}]:
            prompt = text
    return blake2b(msgspec.json.encode(prompt), digest_size=16).digest() if prompt else b""
