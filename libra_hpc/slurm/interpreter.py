"""The Python interpreter of the compute nodes: which it is, and whether it fits a run.

Others take it from `Launch.python`.  `check_python` runs it once, before anything is queued.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

from libra_hpc.config.load import named_paths
from libra_hpc.config.run import RunConfig
from libra_hpc.errors import OperationError, UserError, invalid
from libra_hpc.slurm.queue.command import call
from libra_hpc.user_file import file_of

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
import importlib.util, sys
missing = [name for name in sys.argv[1:] if importlib.util.find_spec(name) is None]
print({MARK!r}, "%d.%d" % sys.version_info[:2], *missing)
"""


def compute_python(config: RunConfig) -> str:
    """The interpreter that starts the agents: ``compute.python``, else the one that submits."""
    return config.compute.python or ("python3" if in_container(config) else sys.executable)


def in_container(config: RunConfig) -> bool:
    """Whether agents start inside the image of ``[compute]``; the local executor starts them as they are."""
    return config.compute.container != "none" and config.slurm.executor != "local"


def check_python(config: RunConfig) -> list[str]:
    """Raise `UserError` when the nodes' interpreter cannot run this configuration.

    Returns a warning when it is not visible from here.
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
    _check_packages(config, python, f"the submitting interpreter {python}" if not named else "it")
    return []


def _check_packages(config: RunConfig, python: str, who: str) -> None:
    """Raise `UserError` where it is too old or lacks a package."""
    field = f"compute.python = {config.compute.python!r}"
    wanted = CONTROL if config.run.engine == "simulated" else (*CONTROL, *ENGINES)
    optional = config.track.libraries
    try:
        version, *lacks = _found(python, (*wanted, *optional.values()))
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


@cache
def _found(python: str, wanted: tuple[str, ...], variables: tuple[tuple[str, str], ...] = ()) -> list[str]:
    """Version of an interpreter, and the packages it lacks.

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


SRUN_S = 15.0
"""For what srun lists of itself."""


SHARED_MEMORY = Path("/dev/shm")
"""Weight files and snapshots are there, and outlive a start of the ranks."""
NOT_ON_NODES = ("compute.python", "compute.image", "run.dir", "slurm.template")
"""Paths that no process inside reads; the run directory is bound by itself."""


class StartCommand(NamedTuple):
    """What stands before the interpreter of the compute nodes."""

    prefix: list[str]
    """In every rank."""
    step: list[str]
    """Options of the step that starts the ranks."""


def start_command(config: RunConfig, run: Path, *, named: bool) -> StartCommand:
    """How the interpreter starts on the nodes: as it is, or inside the container.

    ``named``: Pyxis keeps the unpacked image for later starts of this run.  Raises `UserError` for a folder that
    cannot be bound.
    """
    compute = config.compute
    if compute.container == "none":
        return StartCommand([], [])
    shown = binds(config, run)
    if compute.container == "apptainer":
        gpus = ["--nv"] if config.slurm.device == "cuda" else []
        return StartCommand(["apptainer", "exec", *gpus, *(f"--bind={bind}" for bind in shown), compute.image], [])
    mounts = ",".join(bind if ":" in bind else f"{bind}:{bind}" for bind in shown)
    name = [f"--container-name=libra-hpc-{_identity(compute.image, run)}"] if named else []
    return StartCommand([], [f"--container-image={compute.image}", *name, f"--container-mounts={mounts}"])


def _identity(image: str, run: Path) -> str:
    """Return the identity of an unpacked image.  Two runs on one node never share it: they would share its binds
    too."""
    facts = [str(run), image]
    if os.path.exists(image):
        found = os.stat(image)
        facts += [str(found.st_size), str(found.st_mtime_ns)]
    return hashlib.sha256("\0".join(facts).encode()).hexdigest()[:12]


def binds(config: RunConfig, run: Path) -> list[str]:
    """``compute.binds``, then the folders of the run file that those do not show, none below another."""
    found = list(config.compute.binds)
    shown = [Path(bind) for bind in found if ":" not in bind]
    for key, folder in sorted(folders(config, run), key=lambda pair: len(pair[1].parts)):
        if any(folder.is_relative_to(other) for other in shown):
            continue
        if set(",:") & set(str(folder)) or folder == Path("/"):
            why = f"the container cannot bind {str(folder)!r}"
            raise invalid(key, str(folder), why, "a place below a folder without comma or colon in its path")
        shown.append(folder)
        found.append(str(folder))
    return found


def folders(config: RunConfig, run: Path) -> Iterator[tuple[str, Path]]:
    """Key and folder of everything that the processes of a run read or write."""
    yield "run.dir", run
    yield "compute.local_dir", SHARED_MEMORY
    for key in ("local_dir", "cache_dir"):
        if place := getattr(config.compute, key):
            # The folder above what the first rank may have to make.
            above = place.partition("$")[0].rpartition("/")[0]
            yield f"compute.{key}", Path(above or ("/" if "$" in place else place))
    for key, text in named_paths(config).items():
        path = file_of(text) or Path(text)
        if key in NOT_ON_NODES or not path.is_absolute():
            continue
        for folder in _seen_from(path) if path.is_dir() else {path.parent, path.resolve().parent}:
            yield key, folder


def _seen_from(folder: Path) -> set[Path]:
    """The folder, where it really is, and where the links in it lead, as in the cache of a model hub."""
    found = {folder, folder.resolve()}
    for link in (file for file in folder.iterdir() if file.is_symlink()):
        found |= {Path(os.path.normpath(folder / os.readlink(link))).parent, link.resolve().parent}
    return found


def check_container(config: RunConfig, environ: Mapping[str, str] | None) -> list[str]:
    """Raise `UserError` for an image, runtime or bind that is missing; returns warnings for what is not visible here.

    ``environ``: of Slurm's commands; None: no Slurm answers.
    """
    compute, kind, image = config.compute, config.compute.container, config.compute.image
    if kind == "none" or config.slurm.executor == "local":
        unused = f"compute.image = {image!r}: nothing starts in it, as compute.container is {kind!r}"
        return [unused] if image and kind == "none" else []
    if not image:
        raise invalid("compute.image", "", f"compute.container is {kind!r}", "a container image")
    if kind == "apptainer" and "://" in image:
        why = "every rank would fetch and convert it"
        raise invalid("compute.image", image, why, f"a file: apptainer pull libra.sif {image}")
    named = {f"compute.binds[{index}]": bind.partition(":")[0] for index, bind in enumerate(compute.binds)}
    if kind == "apptainer" or os.path.isabs(image):
        named["compute.image"] = image
    warnings = [warning for key, path in named.items() for warning in _missing(key, path)]
    _check_runtime(config, os.environ if environ is None else environ)
    binds(config, Path(config.run.dir))
    return warnings


def _check_runtime(config: RunConfig, environ: Mapping[str, str]) -> None:
    kind = config.compute.container
    if kind == "apptainer" and not config.compute.setup and shutil.which(kind, path=environ.get("PATH")) is None:
        why = "it is not on PATH here, and compute.setup has no line that brings it"
        valid = "none, pyxis, or such a line ('module load apptainer', or 'command -v apptainer' where nodes have it)"
        raise invalid("compute.container", kind, why, valid)
    if kind == "pyxis" and "--container-image" not in _srun_help(environ):
        raise invalid("compute.container", kind, "srun lacks Pyxis here: no --container-image", "none, apptainer")


def _missing(key: str, path: str) -> Iterator[str]:
    """A warning for a path that nodes alone may have; raises `UserError` where its folder is here without it."""
    if os.path.exists(path):
        return
    above = Path(path).parent
    if above.is_dir() and above != Path("/"):
        raise invalid(key, path, f"{above} is here and has no {Path(path).name!r}", "a file or folder that is there")
    yield f"{key} = {path!r} is not visible from here, so it was not checked"


def _srun_help(environ: Mapping[str, str]) -> str:
    try:
        return call(["srun", "--help"], environ, tries=1, timeout_s=SRUN_S)
    except OperationError:
        # It is missing on PATH, which others report, or does not answer.
        return "--container-image"
