"""Finds the compiled modules of scheduler and simulator, if there is a build of exactly these sources.

mypyc compiles the typed modules to C; `libra_hpc_envs.compile` makes the build.  Decisions are the same to the last bit
and take a third of the time.  A build is a folder of extension modules below the environment's prefix.  Its name has a
hash of the sources and the interpreter, so a build may be missing but is never stale.

- A build with that name exists -> the packages of `MODULES` import from it.
- It does not, or ``LIBRA_HPC_INTERPRETED`` is set (debuggers) -> the sources run.

Imports the standard library only: it runs before the first of these modules.
"""

from __future__ import annotations

import hashlib
import os
import sys
import sysconfig
from pathlib import Path

MODULES = (
    "policies/scheduling/costs",
    "policies/scheduling/board",
    "policies/scheduling/residency",
    "policies/scheduling/causal_mlfq",
    "policies/scheduling/dispatch",
    "simulator/event_queue",
    "simulator/stretch",
    "simulator/timeline",
    "simulator/engine/cache",
    "simulator/engine/simulated_request",
    "simulator/engine/engine_batch",
    "simulator/engine/simulated_engine",
    "simulator/simulated_trajectory",
    "simulator/simulated_agents",
)
"""Modules of `libra_hpc`, as paths, that run for every turn, end of a trajectory, or simulated step."""
INTERPRETED = "LIBRA_HPC_INTERPRETED"
SOURCES = Path(__file__).parent
BUILDS = Path(sys.prefix) / "share" / "libra-hpc"


def build_folder() -> Path:
    """Folder of the build of these sources for this interpreter, whether it exists or not."""
    digest = hashlib.sha256()
    for name in MODULES:
        digest.update((SOURCES / f"{name}.py").read_bytes() + b"\0")
    return BUILDS / f"sched-{digest.hexdigest()[:16]}-{sysconfig.get_config_var('SOABI')}"


def in_use() -> Path | None:
    """The build in use; None if the sources run."""
    if os.environ.get(INTERPRETED):
        return None
    folder = build_folder()
    return folder if folder.is_dir() else None


def use(path: list[str], part: str) -> None:
    """Put the build, if any, first in ``path``: the ``__path__`` of the package in the folder ``part``."""
    if (folder := in_use()) is not None:
        path.insert(0, str(folder / part))
