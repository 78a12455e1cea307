"""What an environment host process is told at its start: one JSON value, decoded into `HostConfig`.

Plain data: importable on a login node and by an agent.
"""

from __future__ import annotations

import sys
from typing import Any

import msgspec

from libra_hpc.config.run import RunConfig


class HostConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One environment host; the ``tool_*`` fields are those of the run file's ``[task]`` table."""

    task: str
    """A built-in task, or ``path/to/file.py:ClassName``."""
    model: str
    """Hugging Face folder whose ``tokenizer.json`` the task uses."""
    options: dict[str, Any] = {}
    """Passed to the task's constructor."""
    seed: int = 0
    """Seed of the data order, unless ``options`` has its own ``seed``."""
    tool_timeout_s: float = 10.0
    """Wall-clock limit of one tool call, not counting the wait for a free tool process."""
    tool_memory_mb: int = 512
    """Address-space limit of a tool process (MiB)."""
    tool_output_bytes: int = 65536
    """A tool's textual output beyond this is cut off."""
    tool_processes: int = 1
    """Sandboxed tool processes, and as many again for model-written code once a task uses it."""


def host_config(config: RunConfig) -> HostConfig:
    """The environment host of a run."""
    task = config.task
    return HostConfig(
        task=task.name,
        model=config.model.path,
        options=task.options,
        seed=config.run.seed,
        tool_timeout_s=task.tool_timeout_s,
        tool_memory_mb=task.tool_memory_mb,
        tool_output_bytes=task.tool_output_bytes,
        tool_processes=task.tool_processes,
    )


def host_command(config: RunConfig) -> list[str]:
    """Command line of an environment host, without its ``--socket``."""
    return [sys.executable, "-m", "libra_hpc.tasks.host", "--config", msgspec.json.encode(host_config(config)).decode()]
