"""Settings of an environment host process: a JSON file, decoded into `HostConfig`.

Only its owner can read it: command lines are public on the machine, and a task's options may hold a key. Plain data,
importable without the task.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import msgspec

from libra_hpc.config.run import RunConfig

MARK, FOUND, PROMPT = "libra-hpc: ", "libra-hpc found: ", "libra-hpc prompt: "
"""Before a line that a host process has for its starter: a mistake, a fact, tokens of a prompt; the task may print
others."""


class HostConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One environment host; ``tool_*`` are those of the run file's ``[task]`` table, where the defaults stand."""

    task: str
    model: str
    """Hugging Face folder whose ``tokenizer.json`` the task uses."""
    options: dict[str, Any]
    chat: dict[str, Any]
    """The run file's ``[chat]`` table, and ``[env]`` by that name."""
    seed: int
    """Seed of the data order, unless ``options`` has a ``seed``."""
    tool_timeout_s: float
    """Time limit of one tool call, without the wait for a free tool process."""
    tool_memory_mb: int
    """Address-space limit of a tool process (MiB)."""
    tool_output_bytes: int
    """Longest textual output of a tool; the rest is cut off."""
    step_limit_s: float
    """Most seconds of a step outside its tool calls, unless the task declares more; 0: no limit."""
    tool_processes: int
    """Most sandboxed tool processes; as many again for model-written code, when a task uses it."""


def host_config(config: RunConfig) -> HostConfig:
    """Settings of a run's hosts: the one place that reads the run's configuration for them."""
    task = config.task
    return HostConfig(
        task=task.host_task,
        model=config.model.path,
        options=task.arguments,
        chat=msgspec.to_builtins(config.chat) | {"env": msgspec.to_builtins(config.env)},
        seed=config.run.seed,
        tool_timeout_s=task.tool_timeout_s,
        tool_memory_mb=task.tool_memory_mb,
        tool_output_bytes=task.tool_output_bytes,
        step_limit_s=config.deadlines.first_s,
        tool_processes=task.tool_processes,
    )


def host_settings(config: RunConfig) -> bytes:
    return msgspec.json.encode(host_config(config))


def host_command(settings: Path) -> list[str]:
    """Command line of an environment host, without ``--socket``."""
    return [sys.executable, "-m", "libra_hpc.host.host", "--config", str(settings)]


def write_private(path: Path, content: bytes) -> None:
    """Write or replace a file that only its owner can read (0600), whatever the umask."""
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
