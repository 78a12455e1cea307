"""Find the Slurm to use, and make the environment for its client commands.

- ``SLURM_CONF`` is set -> the Slurm it names, or an error.
- The site's controller answers -> the site's Slurm.
- Else the embedded cluster is up -> the embedded Slurm.
- Else -> an error.

Every call gets the environment explicitly; this process's own never changes.  Inherited job variables and client
defaults are left out: ``SBATCH_PARTITION`` would override every component, ``SQUEUE_FORMAT`` would change a query.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from libra_hpc.errors import SlurmUnreachable
from libra_hpc.slurm.queue.command import WAYS_OUT

PING_TIMEOUT_S = 15.0
CLIENTS = "clients.json"
"""File of the embedded cluster while it is up: search paths of its client commands, by variable."""
ALLOWED = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT")
"""Slurm variables that are passed on: where the controller is, and who we are."""
DROPPED = ("SLURM", "SBATCH_", "SRUN_", "SALLOC_", "SQUEUE_", "SACCT_", "SINFO_", "SCANCEL_", "SCONTROL_")
"""Prefixes of job variables and client defaults."""
LAUNCHER = ("PMI_", "PMIX_", "PMI2_", "HYDRA_", "HYDI_", "MPI_LOCAL", "OMPI_COMM_", "OMPI_UNIVERSE_")
"""Prefixes of what an MPI launcher sets for a rank: a nested start would take them for its own."""


def clean_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Copy of ``environ`` without job variables, client defaults and launcher leftovers."""
    return {
        name: value for name, value in environ.items() if name in ALLOWED or not name.startswith(DROPPED + LAUNCHER)
    }


def controller_answers(env: Mapping[str, str]) -> bool:
    """Whether ``scontrol ping`` with the environment ``env`` finds a controller that is up."""
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


def embedded_home() -> Path:
    """Folder of the embedded cluster: ``$LIBRA_HPC_CLUSTER``, or ``~/.libra-hpc/cluster``."""
    return Path(os.environ.get("LIBRA_HPC_CLUSTER") or Path.home() / ".libra-hpc" / "cluster").absolute()


def embedded_environment(home: Path, env: Mapping[str, str]) -> dict[str, str] | None:
    """``env`` with the client commands of the embedded cluster in ``home``; None: it is not up."""
    try:
        paths: dict[str, str] = json.loads((home / CLIENTS).read_bytes())
    except (OSError, ValueError):
        return None
    found = {name: os.pathsep.join(filter(None, (path, env.get(name, "")))) for name, path in paths.items()}
    return {**env, **found, "SLURM_CONF": str(home / "etc" / "slurm.conf")}


def slurm_environment(home: Path | None = None) -> dict[str, str]:
    """Environment for Slurm's client commands; ``home`` is the embedded cluster's folder, None: the default.

    Raises `SlurmUnreachable` when no controller answers.
    """
    env = clean_environment(os.environ)
    if controller_answers(env):
        return env
    if named := env.get("SLURM_CONF"):
        raise SlurmUnreachable(
            f"SLURM_CONF = {named!r}: no Slurm controller answers there; valid: the slurm.conf of one that is up, or"
            " unset SLURM_CONF to use the embedded Slurm (`libra-hpc cluster up`)."
        )
    embedded = embedded_environment(home or embedded_home(), env)
    if embedded is not None and controller_answers(embedded):
        return embedded
    why = "" if shutil.which("scontrol", path=env.get("PATH", "")) else " (scontrol is not on PATH)"
    raise SlurmUnreachable(f"No Slurm controller answers{why}; {WAYS_OUT}.")
