"""How the ranks of a job without an owner meet: by files in a folder that all nodes see."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from pathlib import Path

from libra_hpc.files import OWNER_ONLY, write_atomic
from libra_hpc.process.owner_link import MEET_S, NoWorld

CHECK_S = 0.1
"""Between two searches for files; a shared file system may show a new one after half a minute."""


class FolderMeeting:
    """What `OwnerLink` is to the ranks of a run, below a folder of this job."""

    def __init__(self, folder: Path, environ: Mapping[str, str]) -> None:
        self.rank, self.size = int(environ.get("SLURM_PROCID", "0")), int(environ.get("SLURM_NTASKS", "1"))
        # A job that is queued again has other records.
        start = f"{environ.get('SLURM_JOB_ID', '')}-{environ.get('SLURM_RESTART_COUNT', '0')}"
        self._folder, self._round = folder / start, 0
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.secret = self.gather(secrets.token_bytes(32))[0]

    def gather(self, record: bytes) -> list[bytes]:
        """See `OwnerLink.gather`."""
        self._round += 1
        paths = [self._folder / f"{self._round}-{rank}" for rank in range(self.size)]
        write_atomic(paths[self.rank], record, OWNER_ONLY)
        deadline = time.monotonic() + MEET_S
        while len(list(self._folder.glob(f"{self._round}-*"))) < self.size:
            if time.monotonic() > deadline:
                raise NoWorld(f"the ranks did not meet within {MEET_S} s")
            time.sleep(CHECK_S)
        return [path.read_bytes() for path in paths]
