"""Private folders of an agent on its node, and how those of killed agents are removed.

- An agent locks a file in each of its folders (``flock``) for its life; a lock is seen across PID namespaces, a process
  id is not. The lock can be taken -> an orphan: the next agent on the node removes it, and so does the launcher when it
  sees an agent end.
- A *kept* folder outlives its agent while all ranks restart: it is an orphan `KEPT_S` after the last sign of life.
- Names end with random characters, so that no other user of the node can make them first. A folder of another user is
  never used.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

PREFIX = "libra-"
KEPT = f"{PREFIX}kept-"
OWNER_FILE = "owner.lock"
OTHERS = "not a folder of this user"
WRITABLE = "a folder that others can write"
COMPILED = "LIBRA_HPC_COMPILED"
"""Variable with ``compute.cache_dir``, the folder of the compilers' caches."""
NOBODY = 65534
"""User id that stands for root's in a container that knows one user only."""
KEPT_S = 900.0
"""All ranks restart within a minute or a few.  Half: a slow start finds no snapshot; double: a killed job's memory is
taken for so much longer."""
HOLD_S = 1.0
"""Between two signs of life; short, because a folder that was removed is then made again, with mode 0700."""

_locks: dict[Path, int] = {}
"""Descriptors of own locks. A child's ``exec`` closes its copies, so children keep no folder."""


def _bases() -> tuple[Path, Path]:
    """Where sockets and settings go, and where weight files and snapshots go."""
    temporary = Path(tempfile.gettempdir())
    return temporary, Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else temporary


def make_folders() -> tuple[Path, Path]:
    """Make this agent's private and shared-memory folder, and remove those of own agents that were killed.

    Raises `PermissionError` where the folder above, or that of the compilers' caches, is another user's, or others can
    write the latter.
    """
    remove_orphans()
    temporary, given = _bases()[0], os.environ.get(COMPILED, "")
    if temporary.stat().st_uid not in (0, os.getuid(), NOBODY):
        raise PermissionError(errno.EPERM, OTHERS, str(temporary))
    caches = Path(given or temporary / f"cache-{os.getuid()}")
    if given:
        caches.mkdir(mode=0o700, parents=True, exist_ok=True)
    if os.path.lexists(caches) and (not _mine(caches) or caches.stat().st_mode & 0o022):
        raise PermissionError(errno.EPERM, WRITABLE if _mine(caches) else OTHERS, str(caches))
    private, shared = (_make(base) for base in _bases())
    return private, shared


def _make(base: Path) -> Path:
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
        # Another agent may have taken it for an orphan before it was locked.
        with contextlib.suppress(BlockingIOError, FileNotFoundError):
            own(folder)
            return folder


def own(folder: Path) -> None:
    """Make a folder where it is gone, lock it for the life of this process, and give a sign of life.

    Raises `OSError`, also where it is another user's.
    """
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    if not _mine(folder):
        raise PermissionError(errno.EPERM, OTHERS, str(folder))
    folder.chmod(0o700)
    if not owned(folder):
        handle, before = _lock(folder, os.O_CREAT), _locks.pop(folder, -1)
        if before >= 0:
            os.close(before)
        _locks[folder] = handle
        os.ftruncate(handle, 0)
        os.pwrite(handle, str(os.getpid()).encode(), 0)
    os.utime(_locks[folder])


def owned(folder: Path) -> bool:
    """Whether this process has a folder locked, and it is still there."""
    return folder in _locks and _names(folder / OWNER_FILE, _locks[folder])


def remove(folder: Path) -> None:
    """Remove an own folder; its lock goes first, because NFS keeps the names of open files."""
    if folder in _locks:
        os.close(_locks.pop(folder))
    shutil.rmtree(folder, ignore_errors=True)


def _names(path: Path, handle: int) -> bool:
    try:
        return os.path.samestat(os.lstat(path), os.fstat(handle))
    except OSError:
        return False


def _lock(folder: Path, flags: int = 0) -> int:
    """Open and lock the file of a folder; raises `OSError` when another process has it, or removed it meanwhile."""
    path = folder / OWNER_FILE
    handle = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | flags, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not _names(path, handle):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    except OSError:
        os.close(handle)
        raise
    return handle


def _mine(folder: Path) -> bool:
    """Whether it is a folder of this user, and no link to one."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()


def kept_folder(run: Path, place: str) -> Path:
    """Where the agent at a place of a run keeps what the next start needs, in shared memory; a new name if there is
    none yet.

    ``place``: the node's name, or the rank where several agents of the run are on one machine.
    """
    name = f"{_kept_prefix(run)}{place}-"
    found = (folder for folder in sorted(_bases()[1].glob(f"{name}*")) if _mine(folder))
    return next(found, _bases()[1] / f"{name}{secrets.token_hex(8)}")


def remove_kept(run: Path) -> None:
    """Remove what ranks of a run that has ended kept on this node."""
    for folder in filter(_mine, _bases()[1].glob(f"{_kept_prefix(run)}*")):
        shutil.rmtree(folder, ignore_errors=True)


def removal(run: Path) -> str:
    """A shell command that removes on a node what agents of a run left there; what an agent has locked stays."""
    found = f"find /dev/shm -maxdepth 1 -type d -uid {os.getuid()} -name '{_kept_prefix(run)}*'"
    return f"{found} -exec flock --nonblock '{{}}/{OWNER_FILE}' rm -rf '{{}}' ';'"


def _kept_prefix(run: Path) -> str:
    return f"{KEPT}{os.getuid()}-{hashlib.sha256(str(run.resolve()).encode()).hexdigest()[:16]}-"


async def hold(folder: Path) -> None:
    """Make a kept folder this agent's, and give signs of life until cancelled."""
    import asyncio

    while True:
        # A full file system costs what would be kept, not the agent.
        with contextlib.suppress(OSError):
            own(folder)
        await asyncio.sleep(HOLD_S)


def orphans() -> list[Path]:
    """Folders of this user's agents that are gone."""
    return list(_orphans())


def remove_orphans() -> None:
    for folder in _orphans():
        shutil.rmtree(folder, ignore_errors=True)


def _orphans() -> Iterator[Path]:
    """Each is locked until the next is asked for, so that no agent begins to own it."""
    for folder in sorted({folder for base in _bases() for folder in base.glob(f"{PREFIX}*") if _mine(folder)}):
        try:
            handle = _lock(folder)
        except OSError:
            continue
        try:
            silent_s = time.time() - os.fstat(handle).st_mtime
            if silent_s > KEPT_S or not folder.name.startswith(KEPT):
                yield folder
        finally:
            os.close(handle)
