"""Command lines of an agent's child processes.

Here alone a dry run (``run.engine = "simulated"``) differs from a real one.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from libra_hpc.config.run import RunConfig
from libra_hpc.process.node_topology import HCA, beside_gpus, node_topology


def engine_command(config: RunConfig, settings: Path, gpus: str = "") -> list[str]:
    """A rollout engine on ``gpus`` of a node; ``settings`` holds its `EngineConfig`."""
    modules = "libra_hpc.engine", "libra_hpc.simulated.engine_process"
    return _command(config, modules, settings, gpus)


def trainer_command(config: RunConfig, settings: Path, gpus: str = "") -> list[str]:
    """One process of a training replica; ``settings`` holds its `WorkerConfig`."""
    modules = "libra_hpc.trainer.worker", "libra_hpc.simulated.trainer_process"
    return _command(config, modules, settings, gpus)


def choose_adapters(config: RunConfig) -> None:
    """Have NCCL in child processes use the network adapters beside the GPUs, unless a variable names others."""
    if config.run.engine == "real" and config.slurm.device == "cuda" and (found := node_topology().adapters):
        os.environ.setdefault(HCA, found)


def host_command(config: RunConfig, settings: Path) -> list[str]:
    """An environment host; ``settings`` holds the configuration of the run."""
    module = "libra_hpc.host.host" if config.run.engine == "real" else "libra_hpc.simulated.host_process"
    return [sys.executable, "-m", module, "--config", str(settings)]


def _command(config: RunConfig, modules: tuple[str, str], settings: Path, gpus: str) -> list[str]:
    """``modules``: of a real run and of a dry one."""
    real, simulated = modules
    if config.run.engine == "real":
        argv = [sys.executable, "-m", real, "--config", str(settings)]
        return beside_gpus(argv, gpus, node_topology(), os.sched_getaffinity(0)) if gpus else argv
    return [sys.executable, "-m", simulated, "--config", str(settings)]
