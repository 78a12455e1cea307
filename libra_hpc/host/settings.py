"""What an environment host reads of the run's configuration, which it gets as a JSON file.

Only the file's owner can read it: command lines are public on the machine, and a task's options may hold a key.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from libra_hpc.config.run import RunConfig
from libra_hpc.tasks.base import build_task

if TYPE_CHECKING:
    from libra_hpc.tasks.base import Task
    from libra_hpc.tasks.tokenizer import TaskTokenizer

MARK, FOUND, PROMPT = "libra-hpc: ", "libra-hpc found: ", "libra-hpc prompt: "
"""Before a line that a host process has for its starter: a mistake, a fact, tokens of a prompt; the task may print
others."""


def made_from(config: RunConfig) -> dict[str, Any]:
    """What decides what an environment does; where it is the same, trajectories and trials of another start count."""
    task = config.task
    if config.run.engine == "simulated":
        return {"work": task.works, "presets": config.simulated.presets, "seed": config.run.seed}
    tools = task.tool_timeout_s, task.tool_memory_mb, task.tool_output_bytes, task.tool_processes
    return {
        "task": task.host_task,
        "model": config.model.path,
        "options": dict(task.arguments),
        "chat": config.chat,
        "env": config.env,
        "seed": config.run.seed,
        "tools": tools,
    }


def task_of(config: RunConfig, tokenizer: TaskTokenizer) -> Task:
    """The task that hosts of a run serve; raises `UserError` for bad names or options."""
    task = config.task
    chat = msgspec.to_builtins(config.chat) | {
        "env": msgspec.to_builtins(config.env),
        "context": config.rollout.max_model_len,
    }
    return build_task(task.host_task, task.arguments, config.run.seed, tokenizer, chat=chat)


def write_private(path: Path, content: bytes) -> None:
    """Write or replace a file that only its owner can read (0600), whatever the umask."""
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
