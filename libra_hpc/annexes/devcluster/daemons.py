"""Start, find and stop the daemons of the embedded cluster.

A process is ours only if its pid file names it *and* its command line has our program with our configuration.  Process
ids are reused, and a pid file survives a crash of the machine.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from libra_hpc.errors import OperationError

START_TIMEOUT_S = 60.0
"""Seconds.  A daemon puts itself into the background at once; the limit is for a machine that swaps."""
TERM_TIMEOUT_S = 8.0
"""Seconds from SIGTERM to SIGKILL: slurmctld saves its state, and a slurmd without munge ignores SIGTERM."""
POLL_S = 0.02


@dataclass(frozen=True)
class Daemon:
    """A program that puts itself into the background and writes its pid."""

    name: str
    argv: tuple[str, ...]
    identity: tuple[str, ...]
    """Arguments only this daemon of this cluster has."""
    pid_file: Path
    log: Path

    def pid(self) -> int | None:
        """Its process id, or None when it does not run."""
        try:
            pid = int(self.pid_file.read_text())
        except (FileNotFoundError, ValueError):
            return None
        return pid if self.is_at(pid) else None

    def is_at(self, pid: int) -> bool:
        """Whether the process ``pid`` is this daemon."""
        arguments = command_line(pid)
        return (
            bool(arguments)
            and Path(arguments[0]).name == Path(self.argv[0]).name
            and set(self.identity) <= set(arguments)
        )

    def start(self, env: Mapping[str, str]) -> None:
        """Start it and wait until its pid file names it; raises `OperationError` with the end of its log."""
        self.pid_file.unlink(missing_ok=True)
        # A file, not a pipe: a daemon that leaves its standard streams open would never close the pipe.
        output_path = self.log.with_suffix(".start")
        with output_path.open("wb") as output:
            try:
                code = subprocess.run(
                    self.argv,
                    env=dict(env),
                    cwd=self.log.parent,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    timeout=START_TIMEOUT_S,
                ).returncode
            except subprocess.TimeoutExpired:
                code = -1
            except OSError as error:
                raise OperationError(f"{self.name} of the embedded Slurm cannot be run: {error}.") from error
        deadline = time.monotonic() + START_TIMEOUT_S
        while not code and self.pid() is None:
            if time.monotonic() > deadline:
                code = -1
            time.sleep(POLL_S)
        if code:
            raise OperationError(
                f"{self.name} of the embedded Slurm did not start: {last_line(output_path) or last_line(self.log)}"
                f" (log: {self.log})."
            )


def command_line(pid: int) -> list[str]:
    """Arguments of a live process; empty when there is none, or it is a zombie."""
    try:
        data = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return []
    return [part.decode(errors="replace") for part in data.rstrip(b"\0").split(b"\0")] if data else []


def stop(daemons: Sequence[Daemon]) -> list[str]:
    """Stop the running ``daemons`` together, with SIGTERM and then SIGKILL; returns what was stopped."""
    running = {daemon: pid for daemon in daemons if (pid := daemon.pid()) is not None}
    for pid in running.values():
        send(pid, signal.SIGTERM)
    deadline = time.monotonic() + TERM_TIMEOUT_S
    left = dict(running)
    while left and time.monotonic() < deadline:
        time.sleep(POLL_S)
        left = {daemon: pid for daemon, pid in left.items() if daemon.is_at(pid)}
    for pid in left.values():
        send(pid, signal.SIGKILL)
    while any(daemon.is_at(pid) for daemon, pid in left.items()):
        time.sleep(POLL_S)
    for daemon in daemons:
        daemon.pid_file.unlink(missing_ok=True)
    return [f"{daemon.name} ({pid})" for daemon, pid in running.items()]


def send(pid: int, number: signal.Signals) -> None:
    """Signal a process that may have ended."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def job_processes(conf: Path, nodes: Sequence[str]) -> list[int]:
    """Scripts and tasks of jobs of the cluster with this ``conf``, found by Slurm's variables in their environment."""
    wanted_conf = f"SLURM_CONF={conf}".encode()
    wanted_nodes = {f"SLURMD_NODENAME={node}".encode() for node in nodes}
    found = []
    for entry in _processes():
        try:
            variables = set((entry / "environ").read_bytes().split(b"\0"))
        except OSError:
            continue
        if wanted_conf in variables and variables & wanted_nodes:
            found.append(int(entry.name))
    return found


def step_daemons(program: Path, folder: Path) -> list[int]:
    """Processes of ``program`` (slurmstepd) that work in ``folder``, the working folder of the cluster's slurmds.

    They outlive a killed slurmd.  Slurm writes a title over their command line and part of their environment, so
    neither identifies them.
    """
    wanted = program.resolve(), folder.resolve()
    found = []
    for entry in _processes():
        # Only our own processes are readable.
        with contextlib.suppress(OSError):
            if ((entry / "exe").readlink(), (entry / "cwd").readlink()) == wanted:
                found.append(int(entry.name))
    return found


def _processes() -> Iterator[Path]:
    return (entry for entry in Path("/proc").iterdir() if entry.name.isdigit() and int(entry.name) != os.getpid())


def last_line(path: Path) -> str:
    """The last non-empty line of a log; empty without one."""
    try:
        lines = path.read_text(errors="replace").split("\n")
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
