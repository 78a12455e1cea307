"""Files below a folder that an agent fills: no name is resolved by a path that it could change meanwhile.

- `opened` -> a regular file. Links that stay below are followed by `openat2` (Linux 5.6); without it no link is.
- `made` -> a place for a mount: one level after the other, none of them a link. What is in the way is moved aside.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import secrets
import stat

_OPENAT2 = 437
_BENEATH_WITHOUT_MAGIC_LINKS = 0x08 | 0x02
TRIES = 1000
"""Tries to open while the kernel sees a mount or rename anywhere on the node, beside which it follows no `..`."""
_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_libc = ctypes.CDLL(None, use_errno=True)


class _How(ctypes.Structure):
    """``struct open_how``."""

    _fields_ = [("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64)]


def openat2(folder: int, path: str, flags: int) -> int:
    """The system call, which does not leave ``folder``; raises `OSError`."""
    how = _How(flags | os.O_CLOEXEC, 0o666 if flags & os.O_CREAT else 0, _BENEATH_WITHOUT_MAGIC_LINKS)
    sizes = ctypes.byref(how), ctypes.c_size_t(ctypes.sizeof(how))
    found: int = _libc.syscall(ctypes.c_long(_OPENAT2), folder, os.fsencode(path), *sizes)
    if found < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), path)
    return found


def opened(folder: int, path: str, flags: int) -> int:
    """Descriptor of a regular file below ``folder``; raises `OSError` for whatever else is there."""
    if "\0" in path:
        raise ValueError("embedded null byte")
    flags |= os.O_NONBLOCK | os.O_NOCTTY  # a pipe waits for its other end
    for _ in range(TRIES):
        try:
            found = openat2(folder, path, flags)
        except OSError as error:
            if error.errno == errno.EAGAIN:
                continue
            if error.errno == errno.EXDEV:
                raise PermissionError(f"{path!r} leads out of the box") from None
            if error.errno not in (errno.ENOSYS, errno.EPERM):  # EPERM: filters of system calls that do not know it
                raise
            found = _opened_by_levels(folder, path, flags)
        if stat.S_ISREG(mode := os.fstat(found).st_mode):
            return found
        os.close(found)
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        raise PermissionError(f"{path!r} is no file, and would wait for ever")
    raise OSError(errno.EAGAIN, "names change all the time", path)


def _opened_by_levels(folder: int, path: str, flags: int) -> int:
    *above, name = _levels(path) or ["."]
    parent = os.dup(folder)
    try:
        for level in above:
            found = os.open(level, _FOLDER, dir_fd=parent)
            os.close(parent)
            parent = found
        return os.open(name, flags | os.O_NOFOLLOW, 0o666, dir_fd=parent)
    finally:
        os.close(parent)


def _levels(path: str) -> list[str]:
    levels = [level for level in path.split("/") if level not in ("", ".")]
    if ".." in levels:
        raise PermissionError(f"{path!r} leads out of the box")
    return levels


def made(folder: int, path: str, is_folder: bool = True) -> int:
    """Make folders down to a folder or file, with the rights of their owner.

    Returns how often something else stood there, which then lies beside it; raises `OSError`.
    """
    levels, moved, parent = _levels(path), 0, os.dup(folder)
    try:
        for number, name in enumerate(levels, 1):
            as_file = not is_folder and number == len(levels)
            moved += _cleared(parent, name, as_file)
            if not as_file:
                found = os.open(name, _FOLDER, dir_fd=parent)
                os.close(parent)
                parent = found
                os.chmod(f"/proc/self/fd/{parent}", stat.S_IMODE(os.fstat(parent).st_mode) | stat.S_IRWXU)
    finally:
        os.close(parent)
    return moved


def _cleared(parent: int, name: str, as_file: bool) -> bool:
    """Make a folder or file where none is; whether something else was there, which is moved aside."""
    moved = False
    with contextlib.suppress(FileNotFoundError):
        mode = os.lstat(name, dir_fd=parent).st_mode
        if (stat.S_ISREG if as_file else stat.S_ISDIR)(mode):
            return False
        os.rename(name, f"{name[:200]}.aside-{secrets.token_hex(4)}", src_dir_fd=parent, dst_dir_fd=parent)
        moved = True
    if as_file:
        os.close(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=parent))
    else:
        os.mkdir(name, dir_fd=parent)
    return moved
