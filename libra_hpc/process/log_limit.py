"""Logs of child processes stay short, whatever a task prints, and files may be as long as they get.

The children append to the file through descriptors of their own, so it is emptied in place: what is written next
begins at its new end.
"""

from __future__ import annotations

import contextlib
import os
import resource
import socket
from pathlib import Path

LEAST_LIMIT = 1 << 30
"""Bytes of a file that a job must be allowed to write: a policy has more, and so may the log of a long run."""
MOST_BYTES = 64 << 20
"""Half: verbose engines lose what happened an hour ago; double: 48 nodes may fill a small file system."""
KEPT_BYTES = 4 << 20
"""Bytes that stay of a log that is emptied: some ten thousand lines before a fault."""


def raise_file_limit() -> str:
    """Raise the limit of the size of files as far as it goes; returns why that is not enough, or nothing."""
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    if hard == resource.RLIM_INFINITY or hard >= LEAST_LIMIT:
        return ""
    return f"ulimit -f allows files of {hard} bytes on {socket.gethostname()}, too few for logs and checkpoints"


def cut(path: Path) -> bool:
    """Empty a log that is longer than `MOST_BYTES`, and keep its end beside it as ``NAME.old``.

    False: it is short, or the file system refuses.
    """
    with contextlib.suppress(OSError):
        if path.stat().st_size <= MOST_BYTES:
            return False
        with path.open("rb+") as log:
            log.seek(-KEPT_BYTES, os.SEEK_END)
            path.with_name(f"{path.name}.old").write_bytes(log.read(KEPT_BYTES))
            log.truncate(0)
        return True
    return False
