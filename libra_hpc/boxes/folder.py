"""An agent's folder from the outside: nothing in it is found by a path that the agent could change meanwhile.

- `opened` -> a regular file. Each level is opened in the one above, and none is a link.
- `place` -> where a mount goes. What the agent has put there is moved aside.
- `used`, `remove` -> whatever rights and depth its folders have.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import secrets
import stat
import subprocess
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path

FILE_BYTES = 4096
"""Bytes that a file or folder counts at least: a file system has about so many for each that it can hold."""
_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW


@contextlib.contextmanager
def _above(folder: int, path: str, make: Callable[[int, str], None] | None = None) -> Iterator[tuple[int, str]]:
    """Descriptor of the folder that has the last part of a path, and that part; ``make`` lets a level be there."""
    *above, name = [level for level in path.split("/") if level not in ("", ".")] or ["."]
    if ".." in (*above, name):
        raise PermissionError(f"{path!r} leads out of the box")
    with contextlib.ExitStack() as stack:
        for level in above:
            if make is not None:
                make(folder, level)
            folder = os.open(level, _FOLDER, dir_fd=folder)
            stack.callback(os.close, folder)
        yield folder, name


def opened(folder: int, path: str, flags: int) -> int:
    """Descriptor of a regular file below ``folder``; raises `OSError` for whatever else is there, links too."""
    with _above(folder, path, _make if flags & os.O_CREAT else None) as (parent, name):
        # A pipe would wait for its other end.
        found = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY, 0o666, dir_fd=parent)
    if not stat.S_ISREG(os.fstat(found).st_mode):
        os.close(found)
        raise PermissionError(f"{path!r} is no file")
    return found


def _make(parent: int, name: str) -> None:
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, dir_fd=parent)


def place(folder: int, path: str, is_folder: bool) -> int:
    """Make a folder or file to mount at; returns how often something else was in its way, and now lies beside it."""
    moved = list[str]()

    def clear(parent: int, name: str, is_folder: bool = True) -> None:
        _give_rights(parent)
        with contextlib.suppress(FileNotFoundError):
            if (stat.S_ISDIR if is_folder else stat.S_ISREG)(os.lstat(name, dir_fd=parent).st_mode):
                return
            moved.append(f"{name[:200]}.aside-{secrets.token_hex(4)}")
            os.rename(name, moved[-1], src_dir_fd=parent, dst_dir_fd=parent)
        _make(parent, name) if is_folder else os.mknod(name, stat.S_IFREG | 0o600, dir_fd=parent)

    with _above(folder, path, clear) as (parent, name):
        clear(parent, name, is_folder)
    return len(moved)


def used(folders: Iterable[Path], pids: Iterable[int]) -> float:
    """Bytes of folders, and of `/tmp` and `/dev/shm` of processes that have their own; endless where folders are
    deeper than a path can be."""
    try:
        return sum(chain(*map(_sizes, folders), *map(_sizes_beside, pids)))
    except (OSError, RecursionError):
        return math.inf


def _sizes(folder: Path) -> Iterator[int]:
    for base, _, names in os.walk(folder, onerror=_readable):
        yield FILE_BYTES
        for name in names:
            with contextlib.suppress(OSError):
                yield max(FILE_BYTES, os.lstat(os.path.join(base, name)).st_blocks * 512)


def _readable(error: OSError) -> None:
    """Let the owner read a folder at the next look."""
    if error.errno == errno.ENAMETOOLONG:
        raise error
    with contextlib.suppress(OSError):
        found = os.open(error.filename, _FOLDER)
        try:
            _give_rights(found)
        finally:
            os.close(found)


def _give_rights(folder: int) -> None:
    os.chmod(f"/proc/self/fd/{folder}", os.fstat(folder).st_mode & 0o7777 | stat.S_IRWXU)


def _sizes_beside(pid: int) -> Iterator[int]:
    for path in ("/tmp", "/dev/shm"):
        with contextlib.suppress(OSError):
            if os.stat(inside := f"/proc/{pid}/root{path}").st_dev != os.stat(path).st_dev:
                of = os.statvfs(inside)
                yield max((of.f_blocks - of.f_bfree) * of.f_frsize, (of.f_files - of.f_ffree) * FILE_BYTES)


def remove(folder: Path) -> None:
    # Python's own removal holds a descriptor for each level; folders may lack the rights of their owner.
    subprocess.run(
        ["/bin/sh", "-c", 'rm -rf "$1" || { chmod -R u+rwX "$1"; rm -rf "$1"; }', "sh", str(folder)],
        check=False,
        stderr=subprocess.DEVNULL,
    )
