"""Runs a command in a box without network, which finds the endpoint at 127.0.0.1: ``forward.py SOCKET PORT COMMAND``.

Every connection to the port is one to the Unix-domain socket. Only Python's own library: the box has nothing of ours.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading

NOT_FOUND = 127
"""Exit code of a program that cannot be started, as shells have it."""


def copy(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)


def serve(listener: socket.socket, path: str) -> None:
    while True:
        near = listener.accept()[0]
        far = socket.socket(socket.AF_UNIX)
        try:
            far.connect(path)
        except OSError:
            near.close()
            continue
        for pair in ((near, far), (far, near)):
            threading.Thread(target=copy, args=pair, daemon=True).start()


def main(path: str, port: str, *command: str) -> int:
    listener = socket.create_server(("127.0.0.1", int(port)), backlog=64)
    threading.Thread(target=serve, args=(listener, path), daemon=True).start()
    try:
        return subprocess.call(command)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)
        return NOT_FOUND


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
