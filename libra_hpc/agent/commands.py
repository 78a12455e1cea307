"""Command lines of an agent's child processes.

Here alone a dry run (``run.engine = "simulated"``) differs from a real one.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import msgspec

from libra_hpc.config.run import RunConfig
from libra_hpc.host.settings import host_command as real_host
from libra_hpc.host.settings import host_settings as real_settings
from libra_hpc.process.node_topology import HCA, beside_gpus, node_topology
from libra_hpc.simulated.dry_run import pace, workload


def engine_command(config: RunConfig, component: str, settings: Path, gpus: str = "") -> list[str]:
    """A rollout engine on ``gpus`` of a node of ``component``; ``settings`` holds its `EngineConfig`."""
    modules = "libra_hpc.engine", "libra_hpc.simulated.engine_process"
    return _command(config, component, modules, settings, gpus)


def trainer_command(config: RunConfig, component: str, settings: Path, gpus: str = "") -> list[str]:
    """One process of a training replica; ``settings`` holds its `WorkerConfig`."""
    modules = "libra_hpc.trainer.worker", "libra_hpc.simulated.trainer_process"
    return _command(config, component, modules, settings, gpus)


def choose_adapters(config: RunConfig) -> None:
    """Have NCCL in child processes use the network adapters beside the GPUs, unless a variable names others."""
    if config.run.engine == "real" and config.slurm.device == "cuda" and (found := node_topology().adapters):
        os.environ.setdefault(HCA, found)


def host_command(config: RunConfig, settings: Path) -> list[str]:
    """An environment host; ``settings`` holds `host_settings`."""
    if config.run.engine == "real":
        return real_host(settings)
    return [sys.executable, "-m", "libra_hpc.simulated.host_process", "--config", str(settings)]


def host_settings(config: RunConfig) -> bytes:
    """Content of an environment host's settings file: task and options, in a dry run the workload."""
    return real_settings(config) if config.run.engine == "real" else msgspec.json.encode(workload(config))


def _command(config: RunConfig, component: str, modules: tuple[str, str], settings: Path, gpus: str) -> list[str]:
    """``modules``: of a real run and of a dry one."""
    real, simulated = modules
    if config.run.engine == "real":
        argv = [sys.executable, "-m", real, "--config", str(settings)]
        return beside_gpus(argv, gpus, node_topology(), os.sched_getaffinity(0)) if gpus else argv
    paced = msgspec.json.encode(pace(config, component)).decode()
    return [sys.executable, "-m", simulated, "--config", str(settings), "--pace", paced]
