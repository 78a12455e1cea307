"""The Python interpreter of the compute nodes, and the MPI plugin: which they are, and whether they fit a run.

Others take it from `Launch.python`.  `check_python` runs it once, before anything is queued.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from functools import cache

from libra_hpc.config.run import RunConfig
from libra_hpc.errors import OperationError, UserError, invalid
from libra_hpc.protocol.carriers import NIXL_WHEEL
from libra_hpc.slurm.queue.command import call

CONTROL = ("libra_hpc", "mpi4py")
"""Packages of every agent."""
ENGINES = ("vllm", "megatron", "torch")
"""Packages of the engines; a dry run needs none of them."""
OLDEST = (3, 11)
TIMEOUT_S = 60.0
"""Starting Python takes 0.1 s on a warm network file system, and up to half a minute on a cold one."""
MARK = "libra-hpc finds"
# find_spec of a top-level name imports no package.
PROBE = f"""
import glob, importlib.util, sys
mpi = "mpich" if any(glob.glob(glob.escape(path) + "/mpich-*.dist-info") for path in sys.path if path) else "other"
missing = [name for name in sys.argv[1:] if importlib.util.find_spec(name) is None]
print({MARK!r}, "%d.%d" % sys.version_info[:2], mpi, *missing)
"""


def compute_python(config: RunConfig) -> str:
    """The interpreter that starts the agents: ``compute.python``, else the one that submits."""
    return config.compute.python or ("python3" if in_container(config) else sys.executable)


def in_container(config: RunConfig) -> bool:
    """Whether agents start inside the image of ``[compute]``; the local executor starts them as they are."""
    return config.compute.container != "none" and config.slurm.executor != "local"


def check_python(config: RunConfig) -> list[str]:
    """Raise `UserError` when the nodes' interpreter cannot run this configuration.

    Returns a warning when it is not visible from here, or when its MPI may not fit the plugin.  PyPI's mpich never
    fits some.
    """
    named, python, image = config.compute.python, compute_python(config), config.compute.image
    if in_container(config):
        return [f"{python} is inside {image}, so what the nodes need was not checked"]
    absolute = "the absolute path of an interpreter"
    if not os.path.isabs(python):
        where = "no such program on PATH" if shutil.which(python) is None else "the nodes may find another one"
        raise invalid("compute.python", named, where, absolute)
    if not os.path.exists(python):
        if os.path.exists(python.split()[0]):
            raise invalid("compute.python", named, "a command, not one file", absolute)
        return [f"compute.python = {named!r} is not visible from here, so what the nodes need was not checked"]
    if not os.path.isfile(python) or not os.access(python, os.X_OK):
        raise invalid("compute.python", named, "not an executable file", absolute)
    mpi = _check_packages(config, python, f"the submitting interpreter {python}" if not named else "it")
    if mpi != "mpich" or config.slurm.executor == "local" or config.slurm.mpi == PYPI:
        return []
    why = f"{python} has PyPI's mpich, which needs {PYPI!r}: each rank would become a world of its own"
    # The site's variables may put another MPI in its place.
    if config.slurm.mpi in ("none", *PMIX) and not any(name.startswith("MPI4PY_") for name in config.compute.env):
        raise invalid(
            "slurm.mpi", config.slurm.mpi, why, f"{PYPI}, or another MPI that compute.env.MPI4PY_MPIABI names"
        )
    return [f"slurm.mpi = {config.slurm.mpi!r}: {why}"]


def _check_packages(config: RunConfig, python: str, who: str) -> str:
    """Raise `UserError` where it is too old or lacks a package; returns its MPI."""
    field = f"compute.python = {config.compute.python!r}"
    wanted = CONTROL if config.run.engine == "simulated" else (*CONTROL, *ENGINES)
    optional = dict(config.track.libraries)
    if config.rollout.weights_transport == "nixl":
        optional["rollout.weights_transport"] = NIXL_WHEEL
    try:
        version, mpi, *lacks = _found(python, (*wanted, *optional.values()))
    except (OSError, subprocess.SubprocessError) as error:
        why = f"{who} does not run ({_reason(error)})"
        raise invalid("compute.python", config.compute.python, why, "the absolute path of an interpreter") from error
    if config.compute.env:
        try:
            _found(python, (), tuple(sorted(config.compute.env.items())))
        except (OSError, subprocess.SubprocessError) as error:
            why = f"{who} does not start with them ({_reason(error)})"
            raise invalid("compute.env", config.compute.env, why, "variables with which Python starts") from error
    install = f"python3 envs/install.py {config.slurm.device} --venv DIR"
    fix = f"{install} makes one, and compute.python = 'DIR/bin/python' names it"
    if tuple(map(int, version.split("."))) < OLDEST:
        raise UserError(f"{field}: {who} is Python {version} and {'.'.join(map(str, OLDEST))} is needed; {fix}.")
    if missing := [name for name in lacks if name in wanted]:
        names = " and ".join(filter(None, (", ".join(missing[:-1]), missing[-1])))
        raise UserError(f"{field}: {who} lacks {names}, which the nodes need; {fix}.")
    for key, library in optional.items():
        if library in lacks:
            raise UserError(f"{key}: {who} lacks {library}; `{python} -m pip install {library}`, or leave {key} out.")
    return mpi


@cache
def _found(python: str, wanted: tuple[str, ...], variables: tuple[tuple[str, str], ...] = ()) -> list[str]:
    """Version of an interpreter, its MPI (PyPI's ``mpich``, or ``other``), and the packages it lacks.

    ``variables`` are set but for those that name others: the nodes' may differ.

    Raises ``OSError`` or ``SubprocessError`` when it does not run.
    """
    environment = {**os.environ, **{name: text for name, text in variables if "$" not in text}}
    done = subprocess.run(
        [python, "-c", PROBE, *wanted],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    for line in done.stdout.splitlines():
        if line.startswith(MARK):
            return line.removeprefix(MARK).split()
    raise subprocess.CalledProcessError(done.returncode, python, done.stdout, done.stderr)


def _reason(error: OSError | subprocess.SubprocessError) -> str:
    if isinstance(error, subprocess.TimeoutExpired):
        return f"no answer within {TIMEOUT_S:.0f} s"
    if isinstance(error, subprocess.CalledProcessError):
        lines = (error.stderr or "").strip().splitlines()
        return lines[-1].rstrip(".") if lines else f"exit code {error.returncode}, and it is no Python"
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)


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
