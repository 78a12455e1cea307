"""Command lines of an agent's child processes.

Here alone a dry run (``run.engine = "simulated"``) differs from a real one.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from libra_hpc.config.run import RunConfig
from libra_hpc.host.settings import host_command as real_host
from libra_hpc.host.settings import host_settings as real_settings
from libra_hpc.simulated.dry_run import pace, workload


def engine_command(config: RunConfig, component: str, settings: Path) -> list[str]:
    """A rollout engine on a node of ``component``; ``settings`` holds its `EngineConfig`."""
    return _command(
        config, component, real="libra_hpc.engine", simulated="libra_hpc.simulated.engine_process", settings=settings
    )


def trainer_command(config: RunConfig, component: str, settings: Path) -> list[str]:
    """One process of a training replica; ``settings`` holds its `WorkerConfig`."""
    return _command(
        config,
        component,
        real="libra_hpc.trainer.worker",
        simulated="libra_hpc.simulated.trainer_process",
        settings=settings,
    )


def host_command(config: RunConfig, settings: Path) -> list[str]:
    """An environment host; ``settings`` holds `host_settings`."""
    if config.run.engine == "real":
        return real_host(settings)
    return [sys.executable, "-m", "libra_hpc.simulated.host_process", "--config", str(settings)]


def host_settings(config: RunConfig) -> bytes:
    """Content of an environment host's settings file: task and options, in a dry run the workload."""
    return real_settings(config) if config.run.engine == "real" else msgspec.json.encode(workload(config))


def _command(config: RunConfig, component: str, real: str, simulated: str, settings: Path) -> list[str]:
    if config.run.engine == "real":
        return [sys.executable, "-m", real, "--config", str(settings)]
    return [
        sys.executable,
        "-m",
        simulated,
        "--config",
        str(settings),
        "--pace",
        msgspec.json.encode(pace(config, component)).decode(),
    ]
