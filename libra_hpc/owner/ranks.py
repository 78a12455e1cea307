"""The ranks of a start on this machine: started, served, and seen to their ends.

MPICH's ``mpiexec`` ends all ranks when one is killed, announces a death by SIGUSR1, and listens on every network
interface.  Here no port is opened.

- A signal to this process alone, or to its group -> the ranks get it.
- This process is killed -> the kernel sends its ranks SIGTERM.
- A rank ends -> the others get that over their connections (`RankLinks`).
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

from libra_hpc.process.agent_folders import remove_orphans
from libra_hpc.process.owner_link import LINK
from libra_hpc.process.reaper import die_with

from .rank_links import RankLinks

POLL_S = 0.5
"""Most seconds between two checks for ended ranks."""


def start_rank(rank: int, logs: Path, argv: Sequence[str], links: RankLinks) -> subprocess.Popen[bytes]:
    """Start one rank, its output appended to ``agent-<rank>.log``."""
    link, value = links.born(rank)
    launcher = os.getpid()

    def bind_to_launcher() -> None:
        die_with(launcher, signal.SIGTERM)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)

    with link, (logs / f"agent-{rank}.log").open("ab") as log:
        return subprocess.Popen(
            argv,
            env={**os.environ, LINK: value},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            pass_fds=(link.fileno(),),
            preexec_fn=bind_to_launcher,
        )


class LocalRanks:
    """All ranks of a start, as children of this process."""

    def __init__(self, size: int, logs: Path, argv: Sequence[str]) -> None:
        self.links = RankLinks(size)
        self.size, self.down = size, dict[str, str]()
        self._processes = list[subprocess.Popen[bytes]]()
        try:
            for rank in range(size):
                self._processes.append(start_rank(rank, logs, argv, self.links))
        except BaseException:
            # A part of the ranks would wait for the others.
            self.kill()
            self.close()
            raise

    def poll(self) -> bool:
        """Serve the ranks for at most `POLL_S` and note new ends; returns whether any rank lives."""
        for rank, process in enumerate(self._processes):
            if process.poll() is not None:
                self.links.announce(rank)
        # Until the processes have ended, not the connections: a rank's child may hold its connection open.
        if len(self.links.lost) == self.size:
            return False
        self.links.wait(POLL_S)
        return True

    def signal(self, name: str) -> None:
        """Pass a signal on; ranks that got it with this process, as of its group, take the second for the same."""
        for process in self._processes:
            process.send_signal(signal.Signals[f"SIG{name}"])

    def kill(self) -> None:
        for process in self._processes:
            process.kill()

    def close(self) -> list[int]:
        """The exit codes of ranks that have all ended."""
        self.links.close()
        remove_orphans()
        return [process.wait() for process in self._processes]
