"""Declared tools of the sandbox tests: module-level functions, imported by the tool processes."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
import time
from typing import Any


def echo(value: Any) -> Any:
    return value


def obey(code: str) -> None:
    exec(code, {"os": os, "sys": sys, "subprocess": subprocess})


def pid() -> int:
    return os.getpid()


def sleep_for(seconds: float) -> str:
    time.sleep(seconds)
    return "rested"


def text_of(count: int) -> str:
    return "é" * count


def list_of(count: int) -> list[int]:
    return list(range(count))


def unencodable() -> object:
    return object()


def surroundings() -> dict[str, Any]:
    links = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:
            continue
    return {"env": dict(os.environ), "cwd": os.getcwd(), "group": os.getpgid(0), "fds": links}


def start_sleeper(path: str) -> None:
    """Start a child, write its id to ``path``, and hang."""
    child = subprocess.Popen(["sleep", "600"])
    with open(path, "w") as file:
        file.write(str(child.pid))
    time.sleep(600)


def write_to_link(frame: bytes, later_s: float = 0.0) -> str:
    """Send a forged frame to the host, at once or after the call."""
    # The link has the number that it has in the host, which may have any number of files open.
    open_now = (fd for fd in range(3, 1 << 16) if os.path.lexists(f"/proc/self/fd/{fd}"))
    link = next(fd for fd in open_now if stat.S_ISSOCK(os.fstat(fd).st_mode))
    if later_s:
        threading.Timer(later_s, os.write, (link, frame)).start()
    else:
        os.write(link, frame)
    return "written"


def detach(path: str, seconds: float = 0.0) -> str:
    """Start a daemon: a session of its own, an ended parent; its id is in ``path``."""
    child = os.fork()
    if child == 0:
        os.setsid()
        daemon = os.fork()
        if daemon == 0:
            os.execlp("sleep", "sleep", "600")
        with open(f"{path}.new", "w") as file:
            file.write(str(daemon))
        os.rename(f"{path}.new", path)
        os._exit(0)
    os.waitpid(child, 0)
    time.sleep(seconds)
    return "detached"
