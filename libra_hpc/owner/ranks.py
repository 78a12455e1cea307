"""The ranks of one MPI world on this machine: started, served, and seen to their ends.

MPICH's ``mpiexec`` ends all ranks when one is killed, announces a death by SIGUSR1, and listens on every network
interface.  Here MPICH's PMI-1 start-up protocol goes over a socket pair per rank, and no port is opened.

- A signal to this process alone, or to its group -> the ranks get it.
- This process is killed -> the kernel sends its ranks SIGTERM.
- A rank ends -> the others get that over their connections (`RankLinks`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from libra_hpc.process.agent_folders import remove_orphans
from libra_hpc.process.child_environment import of_rank
from libra_hpc.process.owner_link import LINK
from libra_hpc.process.reaper import die_with
from libra_hpc.protocol.start_up import KeyValueSpace

from .rank_links import RankLinks

POLL_S = 0.5
"""Most seconds between two checks for ended ranks."""


def start_rank(
    rank: int, size: int, logs: Path, argv: Sequence[str], links: RankLinks
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start one rank, its output appended to ``agent-<rank>.log``; returns it and our end of its PMI connection."""
    ours, theirs = socket.socketpair()
    link, key = links.born(rank)
    env = of_rank(os.environ, PMI_FD=str(theirs.fileno()), PMI_RANK=str(rank), PMI_SIZE=str(size)) | {LINK: key}
    launcher = os.getpid()

    def bind_to_launcher() -> None:
        die_with(launcher, signal.SIGTERM)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)

    with theirs, link, (logs / f"agent-{rank}.log").open("ab") as log:
        process = subprocess.Popen(
            argv,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            pass_fds=(theirs.fileno(), link.fileno()),
            preexec_fn=bind_to_launcher,
        )
    return process, ours


class LocalRanks:
    """All ranks of a start, as children of this process."""

    def __init__(self, size: int, logs: Path, argv: Sequence[str]) -> None:
        self._space = KeyValueSpace(size, f"local-{os.getpid()}-{time.time_ns()}", f"(vector,(0,1,{size}))")
        self.links = RankLinks()
        self.size, self.down = size, dict[str, str]()
        self._processes, self._connections = list[subprocess.Popen[bytes]](), list[socket.socket]()
        self._unread = [b""] * size
        try:
            for rank in range(size):
                process, connection = start_rank(rank, size, logs, argv, self.links)
                self._processes.append(process)
                self._connections.append(connection)
                self.links.serve(connection, partial(self._answer, rank))
        except BaseException:
            # A part of the ranks would wait for the others.
            self.kill()
            self.close()
            raise

    def poll(self) -> bool:
        """Serve the start-up for at most `POLL_S` and note new ends; returns whether any rank lives."""
        for rank, process in enumerate(self._processes):
            if process.poll() is not None:
                self.links.announce(rank)
        # Until the processes have ended, not the connections: a rank's child may hold its connection open.
        if len(self.links.lost) == self.size:
            return False
        self.links.wait(POLL_S)
        return True

    def _answer(self, rank: int) -> None:
        try:
            data = self._connections[rank].recv(65536)
        except ConnectionResetError:
            data = b""
        if not data:
            self.links.leave(self._connections[rank])
        *lines, self._unread[rank] = (self._unread[rank] + data).split(b"\n")
        for line in lines:
            for target, reply in self._space.answer(rank, line.decode(errors="replace")).items():
                # It may just have died.
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    self._connections[target].sendall(reply.encode() + b"\n")

    def signal(self, name: str) -> None:
        """Pass a signal on; ranks that got it with this process, as of its group, take the second for the same."""
        for process in self._processes:
            process.send_signal(signal.Signals[f"SIG{name}"])

    def kill(self) -> None:
        for process in self._processes:
            process.kill()

    def close(self) -> list[int]:
        """The exit codes of ranks that have all ended."""
        for connection in self._connections:
            connection.close()
        self.links.close()
        remove_orphans()
        return [process.wait() for process in self._processes]
