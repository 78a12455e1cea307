"""Launcher of the ranks of one MPI world on this machine.

``python -m libra_hpc.slurm.ranks --size N --logs DIR -- PROGRAM ...`` replaces MPICH's ``mpiexec``, which ends all
ranks when one is killed, announces a death by SIGUSR1, and listens on every network interface.  It implements MPICH's
PMI-1 start-up protocol over a socket pair per rank and opens no port.

- A signal to the launcher's process group -> the ranks get it; the launcher itself ends after its last rank.
- The launcher is killed -> the kernel sends its ranks SIGTERM.
- All ranks have ended -> the exit code is rank 0's.
- With ``--run DIR`` the end of a rank -> a file `RunDir.gone`; the end of all -> `libra_hpc.slurm.outcome` decides.
- With ``--run DIR`` a rank outlives rank 0 by `STRAGGLERS_S` -> SIGKILL.
"""

from __future__ import annotations

import argparse
import contextlib
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

from libra_hpc.facts.rundir import RunDir
from libra_hpc.process.agent_folders import remove_orphans

from .outcome import REASON, RECOVERIES, STOP_SIGNAL, LauncherDecision, decide, finish, read_end

PR_SET_PDEATHSIG = 1
POLL_S = 0.5
"""Seconds between two checks for ended ranks."""
STRAGGLERS_S = 90.0
"""Seconds from the end of rank 0, or of all others, to SIGKILL for the rest.  Training may save for 60 s once rank 0 is
gone, and an agent needs up to 15 s to end its engines."""
MAXES = "cmd=maxes kvsname_max=256 keylen_max=64 vallen_max=1024"
"""Limits by which MPI libraries split long values over several keys; those of MPICH's own launcher."""


@dataclass
class KeyValueSpace:
    """State of the start-up protocol of one world; does no I/O."""

    size: int
    name: str
    """Unique on this machine for ever: MPICH names its shared memory after it."""
    values: dict[str, str] = field(default_factory=dict)
    waiting: set[int] = field(default_factory=set)
    """Ranks inside the barrier."""

    def __post_init__(self) -> None:
        # All ranks on one node: (first node, nodes, ranks per node).
        self.values["PMI_process_mapping"] = f"(vector,(0,1,{self.size}))"

    def answer(self, rank: int, line: str) -> dict[int, str]:
        """Replies by rank to one line from ``rank``; an unknown command gets none."""
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
    """Start one rank, its output appended to ``agent-<rank>.log``; returns it and our end of its PMI connection."""
    ours, theirs = socket.socketpair()
    env = {**os.environ, "PMI_FD": str(theirs.fileno()), "PMI_RANK": str(rank), "PMI_SIZE": str(size)}
    libc = ctypes.CDLL(None, use_errno=True)

    def bind_to_launcher() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)

    with theirs, (logs / f"agent-{rank}.log").open("ab") as log:
        process = subprocess.Popen(
            argv,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            pass_fds=(theirs.fileno(),),
            preexec_fn=bind_to_launcher,
        )
    return process, ours


def serve(size: int, logs: Path, argv: Sequence[str], note: bool = False) -> int:
    """Start ``size`` ranks of ``argv``, serve their start-up and wait for all; returns rank 0's exit code.

    ``note``: write ``gone-<rank>`` files.
    """
    space = KeyValueSpace(size, f"local-{os.getpid()}-{time.time_ns()}")
    processes, connections, unread = [], {}, {}
    watch = Watch(logs if note else None)
    with selectors.DefaultSelector() as selector:
        for rank in range(size):
            process, connection = start_rank(rank, size, logs, argv)
            processes.append(process)
            connections[rank], unread[rank] = connection, b""
            selector.register(connection, selectors.EVENT_READ, rank)
        # Until the processes have ended, not the connections: a rank's child may hold its connection open.
        while watch.alive(processes):
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
    remove_orphans()
    print("exit codes by rank:", *codes, flush=True)
    return codes[0] if codes[0] >= 0 else 128 - codes[0]


class Watch:
    """Notes the ends of ranks, and kills ranks that outlive rank 0, or rank 0 when it outlives all others."""

    def __init__(self, logs: Path | None) -> None:
        self._logs = logs
        self._gone: set[int] = set()
        self._over_at = 0.0

    def alive(self, processes: Sequence[subprocess.Popen[bytes]]) -> bool:
        """Note new ends, kill stragglers; returns whether any rank lives."""
        before = self._over(len(processes))
        for rank, process in enumerate(processes):
            if rank not in self._gone and process.poll() is not None:
                self._gone.add(rank)
                self._note(rank, process.pid)
        if self._over(len(processes)) and not before:
            self._over_at = time.monotonic()
        alive = len(self._gone) < len(processes)
        if (
            alive
            and self._logs is not None
            and self._over(len(processes))
            and time.monotonic() - self._over_at > STRAGGLERS_S
        ):
            for process in processes:
                process.kill()
        return alive

    def _over(self, size: int) -> bool:
        """Whether rank 0 has ended, or all others have."""
        return 0 in self._gone or len(self._gone) >= size - 1 > 0

    def _note(self, rank: int, pid: int) -> None:
        if self._logs is not None:
            with contextlib.suppress(OSError):
                (self._logs / f"gone-{rank}").write_text(str(pid))


def send(connection: socket.socket, reply: str) -> None:
    """Send a reply to a rank that may just have died."""
    try:
        connection.sendall(reply.encode() + b"\n")
    except (BrokenPipeError, ConnectionResetError):
        return


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Start the ranks of one MPI world on this machine.")
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--logs", type=Path, required=True)
    parser.add_argument("--run", type=Path)
    parser.add_argument("--attempt", type=int, default=1)
    parser.add_argument("--restarts", type=int, default=0)
    parser.add_argument("argv", nargs="+")
    options = parser.parse_args()
    signals: list[int] = []
    # Signals to the group are for the ranks.  Ending before them would make a stopping run appear dead.
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, frame: signals.append(number))
    if options.run is None:
        raise SystemExit(serve(options.size, options.logs, options.argv))
    raise SystemExit(run_attempt(RunDir(options.run), options, signals))


def run_attempt(run: RunDir, options: argparse.Namespace, signals: Sequence[int]) -> int:
    """Start the ranks of a run as often as `libra_hpc.slurm.outcome` decides; returns the exit code."""
    tries, recoveries = 1, 0
    while not signals:
        for path in (run.again(options.attempt), run.met(options.attempt), *run.logs(options.attempt).glob("gone-*")):
            path.unlink(missing_ok=True)
        os.environ[RECOVERIES] = str(recoveries)
        serve(options.size, options.logs, options.argv, note=True)
        counts = {"tries": tries, "recoveries": recoveries, "restarts": options.restarts}
        decision = decide(read_end(run, options.attempt, signalled=bool(signals), **counts))
        if decision.word == "stop":
            return finish(run, options.attempt, decision, signal="TERM" if signals else "")
        print(f"{decision.word}: {decision.reason}", flush=True)
        if decision.word != "repeat":
            os.environ[REASON] = decision.reason if decision.word == "recover" else ""
        tries = tries + 1 if decision.word == "repeat" else 1
        recoveries += decision.word == "recover"
    return finish(run, options.attempt, LauncherDecision("stop", STOP_SIGNAL), signal="TERM")


if __name__ == "__main__":
    main()
