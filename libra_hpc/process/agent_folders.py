"""Private folders of an agent on its node, and how those of killed agents are removed.

Each folder names its owner's process id.  The next agent on the node removes orphans, and so does the launcher when it
sees an agent end.

A *kept* folder outlives its agent while all ranks restart: it is an orphan `KEPT_S` after the last sign of life.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import shutil
import tempfile
import time
from pathlib import Path

PREFIX = "libra-"
KEPT = f"{PREFIX}kept-"
OWNER_FILE = "owner.pid"
KEPT_S = 900.0
"""All ranks restart within a minute or a few.  Half: a slow start finds no snapshot; double: a killed job's memory is
taken for so much longer."""
HOLD_S = 60.0
"""Between two signs of life."""


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


def kept_folder(run: Path, rank: int) -> Path:
    """Where a rank of a run keeps what its next start needs, in shared memory; it may not exist."""
    return _bases()[1] / f"{_kept_prefix(run)}{rank}"


def remove_kept(run: Path) -> None:
    """Remove what ranks of a run that has ended kept on this node."""
    for folder in _bases()[1].glob(f"{_kept_prefix(run)}*"):
        shutil.rmtree(folder, ignore_errors=True)


def _kept_prefix(run: Path) -> str:
    return f"{KEPT}{os.getuid()}-{hashlib.sha256(str(run.resolve()).encode()).hexdigest()[:16]}-"


async def hold(folder: Path) -> None:
    """Make a kept folder this agent's, and give signs of life until cancelled."""
    while True:
        # A full file system costs what would be kept, not the agent.
        with contextlib.suppress(OSError):
            folder.mkdir(mode=0o700, exist_ok=True)
            (folder / OWNER_FILE).write_text(str(os.getpid()))
        await asyncio.sleep(HOLD_S)


def orphans() -> list[Path]:
    """Folders of this user's agents that are gone."""
    found = []
    for base in set(_bases()):
        for folder in base.glob(f"{PREFIX}*"):
            try:
                owner, mine = folder / OWNER_FILE, folder.stat().st_uid == os.getuid()
                silent_s = time.time() - owner.stat().st_mtime
                gone = not Path(f"/proc/{int(owner.read_text())}").exists()
                if mine and gone and (silent_s > KEPT_S or not folder.name.startswith(KEPT)):
                    found.append(folder)
            except (OSError, ValueError):
                continue
    return found


def remove_orphans() -> None:
    for folder in orphans():
        shutil.rmtree(folder, ignore_errors=True)
