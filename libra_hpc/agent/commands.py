"""Command lines of an agent's child processes.

Here alone a dry run (``run.engine = "simulated"``) differs from a real one.
"""

from __future__ import annotations

import sys
from pathlib import Path

from libra_hpc.config.run import RunConfig

MODULES = {
    "engine": ("libra_hpc.engine", "libra_hpc.simulated.engine_process"),
    "trainer": ("libra_hpc.trainer.worker", "libra_hpc.simulated.trainer_process"),
    "host": ("libra_hpc.host.host", "libra_hpc.simulated.host_process"),
}
"""Modules by kind: in a real run, and in a dry one."""


def child_command(config: RunConfig, kind: str, settings: Path) -> list[str]:
    """A child of a kind of `MODULES`; ``settings``: the file with its configuration."""
    real, dry = MODULES[kind]
    return [sys.executable, "-m", real if config.run.engine == "real" else dry, "--config", str(settings)]
