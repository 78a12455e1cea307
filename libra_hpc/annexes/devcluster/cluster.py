"""The embedded cluster: a real Slurm of eight virtual nodes on this machine, for one user, without root.

- `Cluster.up` -> starts missing daemons and returns once every node has registered.
- `Cluster.up` with a changed configuration (host renamed, a port taken) -> restarts all daemons.
- `Cluster.down` -> cancels the jobs, stops the daemons and leaves the state, so job ids go on counting.

Both hold a file lock, so two callers never race.  The home folder has ``etc run state log munge fakedev
spool/<node> tmp/<node>``, ``cluster.json`` (`ClusterRecord`), `CLIENTS` and ``lock``.
"""

from __future__ import annotations

import getpass
import os
import random
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from libra_hpc.errors import OperationError, invalid
from libra_hpc.files import write_atomic
from libra_hpc.slurm.queue.command import CLIENTS, embedded_home

from .conf import GPU_NODES, LONGEST_HOME, NODES, PARTITIONS, ClusterFacts, gres_conf, munge_socket, slurm_conf
from .daemons import Daemon, job_processes, last_line, send, step_daemons, stop
from .packages import SlurmTools, ensure_packages, locked

READY_TIMEOUT_S = 60.0
"""Seconds.  Registration takes 0.1 to 2 s, far longer on a machine busy with engines."""
RESUME_AFTER_S = 3.0
"""Seconds after which a node that is still down or drained is resumed: someone has set it so."""
CANCEL_TIMEOUT_S = 20.0
"""Seconds.  Slurm kills a job's processes ``KillWait`` = 10 s after asking them to end."""
KILL_TIMEOUT_S = 5.0
"""Seconds.  A killed process is gone within milliseconds, unless it hangs in the kernel."""
PORT_RANGE = (20000, 32000)
"""Below Linux's ephemeral range (32768 upwards), so that no outgoing connection takes a port between two starts."""
POLL_S = 0.1
DOWN_STATES = ("down", "drain", "fail", "inval", "unknown")


class ClusterRecord(msgspec.Struct, frozen=True):
    """What a later call needs to find the cluster."""

    root: str
    """Folder of the unpacked packages."""
    ports: dict[str, int]
    first_job_id: int


_decoder = msgspec.json.Decoder(ClusterRecord)


@dataclass(frozen=True)
class ClusterInfo:
    """A running embedded cluster."""

    home: Path
    conf: Path
    environment: dict[str, str]
    """``SLURM_CONF``, ``PATH`` and ``LD_LIBRARY_PATH`` for client commands."""
    nodes: tuple[str, ...]
    partitions: tuple[str, ...]
    ports: dict[str, int]
    pids: dict[str, int]
    """Running daemons: ``munged``, ``slurmctld``, ``slurmd <node>``."""


class Cluster:
    """The embedded cluster in one home folder: ``$LIBRA_HPC_CLUSTER``, or ``~/.libra-hpc/cluster``."""

    def __init__(self, home: Path | None = None) -> None:
        self.home = home.absolute() if home else embedded_home()
        self.conf = self.home / "etc" / "slurm.conf"

    def up(self, progress: Callable[[str], None] = lambda message: None) -> ClusterInfo:
        """Start what does not run and return the cluster; ``progress`` gets short messages.

        Raises `UserError` when the home folder cannot hold sockets, `OperationError` when the packages cannot be
        downloaded or a daemon does not start.
        """
        if len(str(self.home)) > LONGEST_HOME or any(character.isspace() for character in str(self.home)):
            valid = f"a path of at most {LONGEST_HOME} characters without spaces"
            raise invalid("LIBRA_HPC_CLUSTER", str(self.home), "Slurm's sockets and files cannot live there", valid)
        tools = ensure_packages(progress)
        try:
            self.home.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OperationError(
                f"The embedded Slurm's folder {self.home} cannot be made: {error.strerror}."
            ) from error
        with locked(self.home / "lock"):
            try:
                self._start(tools, progress)
            except OperationError:
                # A daemon hangs, or a port was lost: try once more after a clean stop.
                progress("restarting the embedded Slurm")
                self._stop(tools)
                self._start(tools, progress)
        info = self.info()
        if info is None:
            raise OperationError(
                f"The embedded Slurm ended right after its start: {last_line(self.home / 'log' / 'slurmctld.log')}."
            )
        return info

    def down(self) -> list[str]:
        """Cancel the jobs and stop the daemons; returns the names of the stopped daemons."""
        record = self._record()
        if record is None:
            return []
        with locked(self.home / "lock"):
            return self._stop(SlurmTools(Path(record.root)))

    def info(self) -> ClusterInfo | None:
        """The running cluster, or None when its controller does not run."""
        record = self._record()
        if record is None or not Path(record.root).is_dir():
            return None
        tools = SlurmTools(Path(record.root))
        pids = {daemon.name: pid for daemon in self._daemons(tools) if (pid := daemon.pid()) is not None}
        if not {"munged", "slurmctld"} <= pids.keys():
            return None
        return ClusterInfo(
            home=self.home,
            conf=self.conf,
            environment=tools.environment(self.conf),
            nodes=NODES,
            partitions=PARTITIONS,
            ports=record.ports,
            pids=pids,
        )

    def _record(self) -> ClusterRecord | None:
        try:
            return _decoder.decode((self.home / "cluster.json").read_bytes())
        except (FileNotFoundError, NotADirectoryError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None

    def _daemons(self, tools: SlurmTools) -> list[Daemon]:
        """The daemons in starting order: all need munged, and a slurmd waits for its controller."""
        run, log, conf = self.home / "run", self.home / "log", str(self.conf)
        munged = (
            str(tools.sbin / "munged"),
            # munged refuses a socket below a private home directory unless it is forced; ours serves this user alone.
            "--force",
            f"--socket={munge_socket(self.home)}",
            f"--key-file={self.home}/munge/munge.key",
            f"--log-file={log}/munged.log",
            f"--pid-file={run}/munged.pid",
            f"--seed-file={self.home}/munge/munged.seed",
            "--num-threads=4",
        )
        slurmctld = (str(tools.sbin / "slurmctld"), "-f", conf)
        slurmd, stepd = str(tools.sbin / "slurmd"), str(tools.sbin / "slurmstepd")
        return [
            Daemon(
                name="munged",
                argv=munged,
                identity=(f"--socket={munge_socket(self.home)}",),
                pid_file=run / "munged.pid",
                log=log / "munged.log",
            ),
            Daemon(
                name="slurmctld",
                argv=slurmctld,
                identity=(conf,),
                pid_file=run / "slurmctld.pid",
                log=log / "slurmctld.log",
            ),
            *(
                Daemon(
                    name=f"slurmd {node}",
                    argv=(slurmd, "-f", conf, "-N", node, "-d", stepd),
                    identity=(conf, node),
                    pid_file=run / f"slurmd.{node}.pid",
                    log=log / f"slurmd.{node}.log",
                )
                for node in NODES
            ),
        ]

    def _start(self, tools: SlurmTools, progress: Callable[[str], None]) -> None:
        self._configure(tools, progress)
        daemons, env = self._daemons(tools), self._environment(tools)
        missing = [daemon for daemon in daemons if daemon.pid() is None]
        if missing:
            progress(f"starting {len(missing)} of {len(daemons)} daemons of the embedded Slurm")
        for daemon in missing:
            daemon.start(env)
        self._wait_ready(daemons, env)

    def _configure(self, tools: SlurmTools, progress: Callable[[str], None]) -> None:
        """Write folders, key and configuration; stops the daemons when the configuration on disk was another one."""
        self._make_folders()
        # A running cluster has bound its ports; those of a stopped one may have been taken.
        running = any(daemon.pid() for daemon in self._daemons(tools))
        address = _host_address()
        record = self._with_ports(tools, address, running)
        site = ClusterFacts(
            home=self.home,
            host=socket.gethostname(),
            address=address,
            user=getpass.getuser(),
            ports=record.ports,
            first_job_id=record.first_job_id,
        )
        texts = {self.conf: slurm_conf(site, tools), self.conf.with_name("gres.conf"): gres_conf(self.home)}
        if any(not path.exists() or path.read_text() != text for path, text in texts.items()):
            if running:
                progress("the configuration of the embedded Slurm changed: restarting it")
                self._stop(tools)
            for path, text in texts.items():
                write_atomic(path, text.encode())
        write_atomic(self.home / "cluster.json", msgspec.json.encode(record))
        write_atomic(self.home / CLIENTS, msgspec.json.encode(tools.search_paths))

    def _make_folders(self) -> None:
        """Folders, munge's key and the devices of the GPU nodes."""
        nodes = [self.home / parent / node for parent in ("spool", "tmp") for node in NODES]
        for folder in (*(self.home / name for name in ("etc", "run", "log", "fakedev", "munge", "state")), *nodes):
            folder.mkdir(parents=True, exist_ok=True)
        for private in ("munge", "state"):
            (self.home / private).chmod(0o700)
        key = self.home / "munge" / "munge.key"
        if not key.exists():
            with open(os.open(key, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o400), "wb") as handle:
                handle.write(secrets.token_bytes(128))
        for index in range(GPU_NODES.gpus):
            device = self.home / "fakedev" / f"nvidia{index}"
            if not device.is_symlink():
                device.symlink_to("/dev/null")

    def _with_ports(self, tools: SlurmTools, address: str, running: bool) -> ClusterRecord:
        """The record on disk while its ports are the cluster's, else one with free ports."""
        record, names = self._record(), ("slurmctld", *NODES)
        known = record is not None and record.ports.keys() == set(names)
        if record is not None and known and (running or _all_free(record.ports.values(), address)):
            return msgspec.structs.replace(record, root=str(tools.root))
        first = record.first_job_id if record else int(time.time()) % 50_000_000 + 1000
        return ClusterRecord(str(tools.root), _free_ports(names, address), first)

    def _environment(self, tools: SlurmTools) -> dict[str, str]:
        """Environment of the daemons: small, because jobs get theirs from the submitter."""
        inherited = {name: value for name in ("HOME", "TZ", "LANG") if (value := os.environ.get(name))}
        return {**inherited, **tools.environment(self.conf)}

    def _wait_ready(self, daemons: list[Daemon], env: dict[str, str]) -> None:
        """Wait until every node has registered and none is down."""
        started = time.monotonic()
        resumed = False
        while True:
            bad = self._not_ready(env)
            if not bad:
                return
            dead = [daemon for daemon in daemons if daemon.pid() is None]
            waited = time.monotonic() - started
            if dead or waited > READY_TIMEOUT_S:
                culprit = dead[0] if dead else next(daemon for daemon in daemons if daemon.name.endswith(bad[0]))
                raise OperationError(
                    f"The embedded Slurm is not ready: {culprit.name}: {last_line(culprit.log)!r} (log: {culprit.log})."
                )
            if waited > RESUME_AFTER_S and not resumed:
                resumed = True
                self._client(env, ["scontrol", "update", f"NodeName={','.join(bad)}", "State=RESUME"])
            time.sleep(POLL_S)

    def _not_ready(self, env: dict[str, str]) -> list[str]:
        """Nodes that have not registered, or are down."""
        listing = self._client(env, ["sinfo", "--noheader", "--Node", "--format=%N|%T|%v"])
        lines = (line.split("|") for line in listing.splitlines() if line.count("|") == 2)
        states = {node: (state, version) for node, state, version in lines}
        return [node for node in NODES if not _usable(*states.get(node, ("unknown", "N/A")))]

    def _stop(self, tools: SlurmTools) -> list[str]:
        (self.home / CLIENTS).unlink(missing_ok=True)
        daemons, env = self._daemons(tools), self._environment(tools)
        munged, slurmctld, *slurmds = daemons
        if munged.pid() and slurmctld.pid():
            self._cancel_jobs(env)
        # munged last: the others need it to end cleanly.
        stopped = [name for group in (slurmds, [slurmctld], [munged]) for name in stop(group)]
        self._kill_steps(tools)
        return stopped

    def _kill_steps(self, tools: SlurmTools) -> None:
        """Kill what a killed slurmd left behind: scripts, tasks and the daemons of their steps."""
        deadline = time.monotonic() + KILL_TIMEOUT_S
        # Repeated, because a task may start another one between the search and the signal.
        while left := job_processes(self.conf, NODES) + step_daemons(tools.sbin / "slurmstepd", self.home / "log"):
            for pid in left:
                send(pid, signal.SIGKILL)
            if time.monotonic() > deadline:
                return
            time.sleep(POLL_S)

    def _cancel_jobs(self, env: dict[str, str]) -> None:
        deadline = time.monotonic() + CANCEL_TIMEOUT_S
        jobs = self._client(env, ["squeue", "--noheader", "--format=%A"]).split()
        if jobs:
            self._client(env, ["scancel", *jobs])
        while jobs and time.monotonic() < deadline:
            time.sleep(POLL_S)
            jobs = self._client(env, ["squeue", "--noheader", "--format=%A"]).split()

    def _client(self, env: dict[str, str], argv: Sequence[str]) -> str:
        """Standard output of a Slurm command of this cluster; empty when it fails."""
        try:
            return subprocess.run(
                argv, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=CANCEL_TIMEOUT_S
            ).stdout
        except (OSError, subprocess.TimeoutExpired):
            return ""


def _usable(state: str, version: str) -> bool:
    # A trailing * marks a node that does not answer.
    return version not in ("", "N/A") and not state.endswith("*") and not state.startswith(DOWN_STATES)


def _host_address() -> str:
    """IPv4 address of this machine's own name; empty when it does not resolve."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return ""


def _all_free(ports: Iterable[int], address: str) -> bool:
    for port in ports:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((address, port))
            except OSError:
                return False
    return True


def _free_ports(names: tuple[str, ...], address: str) -> dict[str, int]:
    """Consecutive free ports from a random start, so that two users of one machine rarely collide."""
    for _ in range(200):
        first = random.randrange(*PORT_RANGE)
        ports = {name: first + offset for offset, name in enumerate(names)}
        if _all_free(ports.values(), address):
            return ports
    raise OperationError(
        f"The embedded Slurm found no {len(names)} consecutive free ports between {PORT_RANGE[0]} and {PORT_RANGE[1]}."
    )
