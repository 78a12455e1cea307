"""How the interpreter of the nodes starts inside the container of ``[compute]``, and what must be there for that.

- Folders that the run file names are bound at their own places, unless a bind already shows them.
- Apptainer mounts an image file where it starts: nothing is unpacked.
- Pyxis unpacks an image once for each run and node: the container has a name, so later starts find it.
- What is missing for certain -> an error before the queue.  What this machine does not see -> a warning.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from libra_hpc.config.load import named_paths
from libra_hpc.config.run import RunConfig
from libra_hpc.errors import invalid
from libra_hpc.user_file import file_of

SHARED_MEMORY = Path("/dev/shm")
"""Weight files and snapshots are there, and outlive a start of the ranks."""
HELP_S = 15.0
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
    if local := config.compute.local_dir:
        # The folder above what the first rank may have to make.
        above = local.partition("$")[0].rpartition("/")[0]
        yield "compute.local_dir", Path(above or ("/" if "$" in local else local))
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
        done = subprocess.run(
            ["srun", "--help"], env=dict(environ), stdin=subprocess.DEVNULL, capture_output=True, timeout=HELP_S
        )
    except (OSError, subprocess.SubprocessError):
        # It is missing on PATH, which others report, or does not answer.
        return "--container-image"
    return done.stdout.decode(errors="replace")
