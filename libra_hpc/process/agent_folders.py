"""Private folders of an agent on its node, and how those of killed agents are removed.

Each folder names its owner's process id.  The next agent on the node removes orphans, and so does the launcher when it
sees an agent end.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

PREFIX = "libra-"
OWNER_FILE = "owner.pid"


def _bases() -> tuple[Path, Path]:
    """Where sockets and settings go, and where weight files and snapshots go."""
    temporary = Path(tempfile.gettempdir())
    return temporary, Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else temporary


def make_folders() -> tuple[Path, Path]:
    """Make this agent's private and shared-memory folder, and remove those of own agents that were killed."""
    remove_orphans()
    made = []
    for base in _bases():
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
        (folder / OWNER_FILE).write_text(str(os.getpid()))
        made.append(folder)
    return made[0], made[1]


def orphans() -> list[Path]:
    """Folders of this user's agents that are gone."""
    found = []
    for base in set(_bases()):
        for folder in base.glob(f"{PREFIX}*"):
            try:
                if (
                    folder.stat().st_uid == os.getuid()
                    and not Path(f"/proc/{int((folder / OWNER_FILE).read_text())}").exists()
                ):
                    found.append(folder)
            except (OSError, ValueError):
                continue
    return found


def remove_orphans() -> None:
    for folder in orphans():
        shutil.rmtree(folder, ignore_errors=True)
