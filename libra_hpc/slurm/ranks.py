"""Start the ranks of one MPI world on this machine and outlive every one of them: ``python -m libra_hpc.slurm.ranks --size N --logs DIR -- PROGRAM ...``.

MPICH's own ``mpiexec`` ends the remaining ranks when one is killed (``-disable-auto-cleanup`` only delays it), uses SIGUSR1 to announce a death, and
listens on every network interface.  A run must survive a lost rank, so this launcher speaks MPICH's PMI-1 start-up protocol itself: one
socket pair per rank (``PMI_FD``), text lines ``cmd=... key=value ...``, a key-value space and a barrier.  It opens no port.

The ranks stay in the launcher's process group, so a signal to the group reaches them all; the launcher itself ignores all but SIGKILL and
leaves when its last rank has.  Should it be killed, the kernel sends its ranks SIGTERM.  Exit code: rank 0's.

With ``--begun FILE`` (any number), files of which the ranks make one once they are one world, a start that ended without any is repeated
(`START_TRIES`), unless the launcher was told to leave meanwhile.  When they leave the file behind that ``--again`` names, they are started again.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

PR_SET_PDEATHSIG = 1
POLL_S = 0.5
"""Between two looks for ended ranks: once started up, ranks rarely say anything."""
START_TRIES = 3
"""Starts of an attempt's agents, while they do not even meet.  The one known cause of such a start is dealt with in `libra_hpc.slurm.pmi`; for causes not
yet met (a node slow to load Python, a network that hiccups), repeating costs seconds, giving up a place in the queue."""
MAXES = "cmd=maxes kvsname_max=256 keylen_max=64 vallen_max=1024"
"""Limits the ranks' libraries respect when they split long values over several keys; those of MPICH's own launcher."""


@dataclass
class KeyValueSpace:
    """The protocol's state for one world, free of any I/O."""

    size: int
    name: str
    """Unlike that of any other world on this machine, ever: MPICH names its shared memory after it."""
    values: dict[str, str] = field(default_factory=dict)
    waiting: set[int] = field(default_factory=set)
    """Ranks inside the barrier."""

    def __post_init__(self) -> None:
        # All ranks on one node: (first node, nodes, ranks per node).
        self.values["PMI_process_mapping"] = f"(vector,(0,1,{self.size}))"

    def answer(self, rank: int, line: str) -> dict[int, str]:
        """Replies by rank to one line from ``rank``; an unknown command gets none, as the protocol asks."""
        fields = dict(part.split("=", 1) for part in line.split() if "=" in part)
        key = fields.get("key", "")
        match fields.get("cmd"):
            case "init":
                reply = "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0"
            case "get_maxes":
                reply = MAXES
            case "get_appnum":
                reply = "cmd=appnum appnum=0"
            case "get_my_kvsname":
                reply = f"cmd=my_kvsname kvsname={self.name}"
            case "get_universe_size":
                reply = f"cmd=universe_size size={self.size}"
            case "put":
                self.values[key] = fields.get("value", "")
                reply = "cmd=put_result rc=0 msg=success"
            case "get" if key in self.values:
                reply = f"cmd=get_result rc=0 msg=success value={self.values[key]}"
            case "get":
                reply = "cmd=get_result rc=-1 msg=key_not_found value=unknown"
            case "finalize":
                reply = "cmd=finalize_ack"
            case "barrier_in":
                self.waiting.add(rank)
                if len(self.waiting) < self.size:
                    return {}
                released, self.waiting = self.waiting, set()
                return dict.fromkeys(released, "cmd=barrier_out")
            case _:
                return {}
        return {rank: reply}


def start_rank(rank: int, size: int, logs: Path, argv: Sequence[str]) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start one rank with its output appended to ``agent-<rank>.log``; returns it and our end of its PMI connection."""
    ours, theirs = socket.socketpair()
    env = {**os.environ, "PMI_FD": str(theirs.fileno()), "PMI_RANK": str(rank), "PMI_SIZE": str(size)}
    libc = ctypes.CDLL(None, use_errno=True)

    def bind_to_launcher() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)

    with theirs, (logs / f"agent-{rank}.log").open("ab") as log:
        process = subprocess.Popen(
            argv, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, pass_fds=(theirs.fileno(),), preexec_fn=bind_to_launcher
        )
    return process, ours


def serve(size: int, logs: Path, argv: Sequence[str]) -> int:
    """Start ``size`` ranks of ``argv``, serve their start-up, wait for all; returns rank 0's exit code."""
    space = KeyValueSpace(size, f"local-{os.getpid()}-{time.time_ns()}")
    processes, connections, unread = [], {}, {}
    with selectors.DefaultSelector() as selector:
        for rank in range(size):
            process, connection = start_rank(rank, size, logs, argv)
            processes.append(process)
            connections[rank], unread[rank] = connection, b""
            selector.register(connection, selectors.EVENT_READ, rank)
        # Until the processes are gone, not until the connections are: a rank's child may hold its connection open.
        while any(process.poll() is None for process in processes):
            for key, _ in selector.select(POLL_S):
                rank = key.data
                try:
                    data = connections[rank].recv(65536)
                except ConnectionResetError:
                    data = b""
                if not data:
                    selector.unregister(connections[rank])
                *lines, unread[rank] = (unread[rank] + data).split(b"\n")
                for line in lines:
                    for target, reply in space.answer(rank, line.decode(errors="replace")).items():
                        send(connections[target], reply)
    codes = [process.wait() for process in processes]
    print("exit codes by rank:", *codes, flush=True)
    return codes[0] if codes[0] >= 0 else 128 - codes[0]


def send(connection: socket.socket, reply: str) -> None:
    """Answer a rank that may just have died."""
    try:
        connection.sendall(reply.encode() + b"\n")
    except (BrokenPipeError, ConnectionResetError):
        return


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Start the ranks of one MPI world on this machine.")
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--logs", type=Path, required=True)
    parser.add_argument("--begun", type=Path, action="append", default=[])
    parser.add_argument("--again", type=Path)
    parser.add_argument("argv", nargs="+")
    options = parser.parse_args()
    told: list[int] = []
    # The group's signals are the ranks' business; leaving before them would make a stopping run look dead.
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, frame: told.append(number))
    while True:
        for path in (options.again, *options.begun) if options.again else ():
            path.unlink(missing_ok=True)
        code = start(options.size, options.logs, options.argv, options.begun, told)
        if told or not (options.again and options.again.exists()):
            raise SystemExit(code)
        print("the ranks start again", flush=True)


def start(size: int, logs: Path, argv: Sequence[str], begun: Sequence[Path], told: Sequence[int]) -> int:
    """`serve`, again while the ranks never met; returns rank 0's exit code."""
    for count in range(1, START_TRIES + 1):
        code = serve(size, logs, argv)
        if told or not begun or any(path.exists() for path in begun):
            break
        print(f"start {count}: the ranks did not meet", flush=True)
    return code


if __name__ == "__main__":
    main()
