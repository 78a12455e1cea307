"""Check the ``srun --mpi`` plugin of a job before it waits in the queue.

srun refuses an unknown plugin only when the job starts.  With the wrong one every rank is an MPI world of its own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from libra_hpc.config.run import RunConfig
from libra_hpc.errors import OperationError, invalid
from libra_hpc.slurm.queue.command import call

PMIX = ("pmix", *(f"pmix_v{number}" for number in range(1, 6)))
KNOWN = ("pmi2", *PMIX, "cray_shasta", "pspmi", "pspmix", "none")
"""Plugins of Slurm and of ParaStation, for where srun itself does not answer."""
PYPI = "pmi2"
"""The plugin for PyPI's mpich (through `libra_hpc.slurm.pmi`)."""
TIMEOUT_S = 15.0


def check_plugin(config: RunConfig, listed: list[str]) -> None:
    """Raise `UserError` for a plugin that ``srun`` does not list, or without a list one that no Slurm has."""
    wanted = config.slurm.mpi
    if config.slurm.executor == "local" or wanted in (listed or KNOWN):
        return
    why = "srun has no such MPI plugin here" if listed else "no Slurm has such an MPI plugin"
    raise invalid("slurm.mpi", wanted, f"{why} (PyPI's mpich needs {PYPI}, Open MPI pmix)", listed or KNOWN)


def mpi_plugins(env: Mapping[str, str]) -> list[str]:
    """Plugins in ``srun --mpi=list`` with this environment; empty where it does not answer."""
    try:
        # Earlier releases write the list as log lines to stderr.
        return parse_plugins(call(["srun", "--mpi=list"], env, tries=1, timeout_s=TIMEOUT_S, with_errors=True))
    except OperationError:
        return []


def parse_plugins(text: str) -> list[str]:
    """Plugin names in srun's answer: one a line below a heading, versions of PMIx together in one line."""
    heading, _, rest = text.partition("types are")
    if not heading or not rest:
        return []
    names: list[str] = []
    for line in rest.splitlines():
        words = line.strip().removeprefix("srun:").strip()
        _, colon, versions = words.partition("available:")
        for name in versions.split(",") if colon else [words]:
            if re.fullmatch(r"\w+", name.strip()):
                names.append(name.strip())
    return list(dict.fromkeys(names))
