"""Ends processes that outlive whoever started them, so that nothing below this process escapes (Linux).

A process whose parent ends becomes the child of its nearest ancestor that is a *subreaper*, whatever its session.

- `become_subreaper`, once at the start -> what is left of children that die comes here and not to init.
- `end_children` -> all children but those to spare are killed and reaped, and those that come up in their place.
- `end_marked` -> one round of the same for what carries a mark of something that has ended.
- `end_strangers` -> one round of the same, sparing the children it names and those of this session.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import time
from collections.abc import Collection

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_WALL = 0x40000000
"""__WALL of waitpid: children of every kind."""
LOCKS = 10
"""RLIMIT_LOCKS, which limits nothing since Linux 2.4.25. All that a process starts have its number, and none but root's
can raise it."""
POLL_S = 0.001
"""Between two rounds of `end_children`: a killed process takes about as long to end."""


_libc = ctypes.CDLL(None, use_errno=True)


def prctl(option: int, argument: int, pointer: int = 0) -> None:
    """The system call; raises `OSError`."""
    if _libc.prctl(option, *(ctypes.c_ulong(value) for value in (argument, pointer, 0, 0))) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl({option}): {os.strerror(code)}")


def die_with(parent: int, number: int = signal.SIGKILL) -> None:
    """Get signal ``number`` when the starting thread ends; exit at once when ``parent`` has already ended."""
    prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os._exit(1)


def become_subreaper() -> None:
    """Adopt the orphans below this process, from now to its end.  Children do not inherit it."""
    prctl(_PR_SET_CHILD_SUBREAPER, 1)


def children() -> set[int]:
    """Ids of this process's children, ended ones that are not reaped included."""
    if not os.path.exists(f"/proc/self/task/{os.getpid()}/children"):
        return _children_by_scan()  # a kernel without CONFIG_PROC_CHILDREN
    return children_of(os.getpid())


def _children_by_scan() -> set[int]:
    """The same from the parents of all processes; about 10 us for each on the machine."""
    found: set[int] = set()
    for name in os.listdir("/proc"):
        try:
            if name.isdigit():
                with open(f"/proc/{name}/stat", "rb") as file:
                    if int(file.read().rpartition(b")")[2].split()[1]) == os.getpid():
                        found.add(int(name))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def descendants() -> set[int]:
    return descendants_of(os.getpid())


def descendants_of(pid: int) -> set[int]:
    """Ids of all processes below a process."""
    found: set[int] = set()
    new = children() if pid == os.getpid() else children_of(pid)
    while new:
        found |= new
        new = {child for pid in new for child in children_of(pid)} - found
    return found


def children_of(pid: int) -> set[int]:
    found: set[int] = set()
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/children") as file:
                found.update(int(child) for child in file.read().split())
    return found


def end_children(limit_s: float, spared: Collection[int] = ()) -> bool:
    """Kill and reap everything below this process, a subreaper; False if something is left after ``limit_s`` seconds.

    Children in ``spared`` go on, with all below them: whoever started them waits for them.
    """
    deadline = time.monotonic() + limit_s
    while left := [pid for pid in children().difference(spared) if not reaped(pid)]:
        if time.monotonic() > deadline:
            return False
        for pid in left:
            _kill(pid)
        time.sleep(POLL_S)
    return True


def end_strangers(known: Collection[int]) -> list[int]:
    """Kill and reap, in one round, children that are neither in ``known`` nor of this process's session.

    Returns the killed.  Their children come up in their place: call it until it returns none.  Never call it while a
    child is being started whose id is not known yet.  No process can enter another's session, so what a tool left is
    not of it.
    """
    session, killed = os.getsid(0), []
    for pid in children().difference(known):
        try:
            if os.getsid(pid) != session and os.waitpid(pid, os.WNOHANG | _WALL)[0] == 0 and _kill(pid):
                killed.append(pid)
        except (ProcessLookupError, ChildProcessError):
            continue
    return killed


def end_marked(running: Collection[int]) -> bool:
    """Kill and reap, in one round, children of this subreaper whose mark is not in ``running``, and all below them.

    A mark is a limit `LOCKS` other than this process's. False when there are none.
    """
    own, found = resource.getrlimit(LOCKS), False
    for pid in children():
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            mark = resource.prlimit(pid, LOCKS)
            if mark != own and mark[1] not in running:
                found = True
                for one in (pid, *descendants_of(pid)):
                    _kill(one)
                reaped(pid)
    return found


def _kill(pid: int) -> bool:
    """SIGKILL; False where that is not permitted or the process is gone."""
    try:
        os.kill(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def reaped(pid: int) -> bool:
    """Whether a child has ended; it is reaped then."""
    try:
        return os.waitpid(pid, os.WNOHANG | _WALL)[0] == pid
    except ChildProcessError:
        return True
