"""Command lines of an agent's child processes.

Here alone a dry run (``run.engine = "simulated"``) differs from a real one.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from libra_hpc.config.run import RunConfig
from libra_hpc.process.node_topology import HCA, beside_gpus, node_topology

MODULES = {
    "engine": ("libra_hpc.engine", "libra_hpc.simulated.engine_process"),
    "trainer": ("libra_hpc.trainer.worker", "libra_hpc.simulated.trainer_process"),
    "host": ("libra_hpc.host.host", "libra_hpc.simulated.host_process"),
}
"""Modules by kind: in a real run, and in a dry one."""


def child_command(config: RunConfig, kind: str, settings: Path, gpus: str = "") -> list[str]:
    """A child of a kind of `MODULES`, on ``gpus`` of the node; ``settings``: the file with its configuration."""
    real = config.run.engine == "real"
    argv = [sys.executable, "-m", MODULES[kind][0 if real else 1], "--config", str(settings)]
    return beside_gpus(argv, gpus, node_topology(), os.sched_getaffinity(0)) if gpus and real else argv


def choose_adapters(config: RunConfig) -> None:
    """Have NCCL in child processes use the network adapters beside the GPUs, unless a variable names others."""
    if config.run.engine == "real" and config.slurm.device == "cuda" and (found := node_topology().adapters):
        os.environ.setdefault(HCA, found)
