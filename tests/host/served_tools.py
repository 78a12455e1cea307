"""Tools around a process that their module starts at import, like a browser driver."""

from __future__ import annotations

import subprocess

SERVER = subprocess.Popen(
    ["sh", "-c", "while read line; do sleep 600 & echo $line; done"],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
)


def ask(text: str) -> str:
    """An answer of the server, which starts a child for each."""
    assert SERVER.stdin is not None
    assert SERVER.stdout is not None
    subprocess.Popen(["sleep", "600"])
    SERVER.stdin.write(f"{text}\n")
    SERVER.stdin.flush()
    return SERVER.stdout.readline().strip()


def pids() -> tuple[int, bool]:
    """The server's id, and whether it runs."""
    return SERVER.pid, SERVER.poll() is None
