"""The hot modules of the scheduler as machine code, when there is a build of exactly these sources.

A decision is some 1,500 bytecodes (`sched.cmlfq` and what it calls).  mypyc turns the same typed Python into C, which
takes a third of the time and decides the same to the last bit (a test compares).  `libra_hpc_envs.compile` makes a
build; this module only finds it.

A build is a folder of extension modules below the environment's prefix, named by the hash of the sources it was made of
and by the interpreter.  When it is there, `libra_hpc.sched` looks for its modules in it first; when anything differs,
as after an edit or an update, it is not found, and the sources run as they are.  So a build can be missing, but never
stale.  `INTERPRETED` = LIBRA_HPC_INTERPRETED set to anything has the sources run in any case (debuggers).

Standard library only, and nothing of ours: it runs before the first module of `libra_hpc.sched` is imported.
"""

from __future__ import annotations

import hashlib
import os
import sys
import sysconfig
from pathlib import Path

MODULES = (
    "linear",
    "survival",
    "blend",
    "signal_effect",
    "signals",
    "groups",
    "remaining_work",
    "costs",
    "concurrency",
    "speed",
    "board",
    "engine_loads",
    "ttl",
    "cmlfq",
)
"""Of `libra_hpc.sched`, the ones a turn or the end of a trajectory goes through."""
INTERPRETED = "LIBRA_HPC_INTERPRETED"
SOURCES = Path(__file__).parent / "sched"
BUILDS = Path(sys.prefix) / "share" / "libra-hpc"


def build_folder() -> Path:
    """Where the build of these sources for this interpreter is, or would be."""
    digest = hashlib.sha256()
    for name in MODULES:
        digest.update((SOURCES / f"{name}.py").read_bytes() + b"\0")
    return BUILDS / f"sched-{digest.hexdigest()[:16]}-{sysconfig.get_config_var('SOABI')}"


def in_use() -> Path | None:
    """The build that is used; None when there is none, or when somebody asked for the sources."""
    if os.environ.get(INTERPRETED):
        return None
    folder = build_folder()
    return folder if folder.is_dir() else None


def use(path: list[str]) -> None:
    """Put the build, if there is one, before a package's own folder; ``path`` is the ``__path__`` of
    `libra_hpc.sched`."""
    if (folder := in_use()) is not None:
        path.insert(0, str(folder))
