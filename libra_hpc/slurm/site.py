"""Which Slurm is meant: the site's when its controller answers, else the embedded one when it is up, else a clear
error.

The answer is a complete environment for client commands, passed explicitly to every call; this process's own
environment is never changed. Inherited job variables and client defaults are left out of it, because Slurm's commands
obey them before they obey a script (``SBATCH_PARTITION`` overrides every component's partition, ``SQUEUE_FORMAT``
changes what a query prints).
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from libra_hpc.errors import SlurmUnreachable
from libra_hpc.slurm.devcluster.cluster import Cluster

from .command import WAYS_OUT

PING_TIMEOUT_S = 15.0
KEPT = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT")
"""Slurm variables that say where the controller is and who we are, not what to do."""
DROPPED = ("SLURM", "SBATCH_", "SRUN_", "SALLOC_", "SQUEUE_", "SACCT_", "SINFO_", "SCANCEL_", "SCONTROL_")
LAUNCHER = ("PMI_", "PMIX_", "PMI2_", "HYDRA_", "HYDI_", "MPI_LOCAL", "OMPI_COMM_", "OMPI_UNIVERSE_")
"""What an MPI launcher leaves in a rank's environment: a nested start would take it for its own."""


def clean_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Copy of ``environ`` without job variables, client defaults and launcher leftovers."""
    return {name: value for name, value in environ.items() if name in KEPT or not name.startswith(DROPPED + LAUNCHER)}


def controller_answers(env: Mapping[str, str]) -> bool:
    """Whether ``scontrol ping`` finds a controller that is up, with the environment ``env``."""
    scontrol = shutil.which("scontrol", path=env.get("PATH", ""))
    if scontrol is None:
        return False
    try:
        done = subprocess.run(
            [scontrol, "ping"],
            env=dict(env),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PING_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return False
    # A backup controller may be the one that is up.
    return any(line.startswith("Slurmctld(") and line.rstrip().endswith("UP") for line in done.stdout.splitlines())


def slurm_environment(home: Path | None = None) -> dict[str, str]:
    """Environment for Slurm's client commands; ``home`` is the embedded cluster's folder when not the default.

    Raises `SlurmUnreachable` when no controller answers.
    """
    env = clean_environment(os.environ)
    if controller_answers(env):
        return env
    info = Cluster(home).info()
    if info is not None:
        embedded = {**env, **info.environment}
        if controller_answers(embedded):
            return embedded
    raise SlurmUnreachable(f"No Slurm controller answers; {WAYS_OUT}.")
