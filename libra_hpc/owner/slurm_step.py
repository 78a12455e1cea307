"""The ranks of a start as a step of this Slurm job, and what Slurm's commands report of the job.

- A signal to the batch script -> the ranks, by ``srun``.
- A rank ends -> its connection does (`RankLinks`), and the others get that after `SETTLE_S`; all have -> ``srun`` ends.
- Slurm sets a node down -> ``srun`` prints it, and the others get the ends of its ranks with the reason.
- All have ended, and ``srun`` has not -> Slurm lost a daemon that would tell it: the step is cancelled, then left.
- A rank outlives SIGKILL -> `SlurmStep.leave_out`: its node hangs, so the step is left as if it had ended.
- ``srun`` itself is never killed: its step would stay and hold the nodes.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from libra_hpc.errors import SlurmUnreachable
from libra_hpc.facts.rundir import RunDir
from libra_hpc.process.addresses import loopback, own_addresses
from libra_hpc.process.owner_link import OWNER
from libra_hpc.protocol.ranks_stop import JOB_END, KILL_WAIT
from libra_hpc.slurm.queue.command import TRANSIENT_FAILURES
from libra_hpc.slurm.writer import STEP

from .rank_links import RankLinks

POLL_S = 0.5
"""Most seconds between two checks for ended ranks."""
SETTLE_S = 1.0
"""From the end of a connection to its report.  Half: srun names the node of a rank that Slurm ended only afterwards;
double: turns wait longer for another engine."""
KILL_AGAIN_S = 10.0
"""Between two SIGKILLs to a step: the first may come before Slurm has all its tasks."""
UNTOLD_S, OVER_S = 5.0, 20.0
"""From the end of the last rank, with which ``srun`` ends in a second, to a cancelling of the step, and to its end
whatever ``srun`` waits for.

Half: a busy controller looks like that; double: whoever cancels a run waits for a minute."""
CLOSE_S = 2.0
"""For srun to end with the ranks of a job that Slurm takes apart; at all other times it has ended."""
COMMAND_S = 60.0
"""For a command of Slurm, while its controller is busy."""
WAIT_S = 5.0
"""Between two notes of a command that has not answered; its status is silent after a minute."""
on_wait: list[Callable[[str], object]] = []
"""Who gets a sentence while a command of Slurm does not answer."""
QUEUED = ("PENDING", "COMPLETING", "REQUEUED")
"""States of a component that is being queued again."""
_FAILED = re.compile(r"srun: error: Node failure on (\S+)")


class SlurmStep:
    """All ranks of a start; ``argv`` is srun's command line."""

    def __init__(self, run: RunDir, attempt: int, size: int, argv: Sequence[str], interface: str = "") -> None:
        self._step = run.logs(attempt) / STEP
        self._step.unlink(missing_ok=True)
        self.size, self.down, self.links = size, dict[str, str](), RankLinks(size)
        self._killed_at = float("-inf")
        self._output, self._read = run.logs(attempt) / "slurm.out", 0
        with contextlib.suppress(OSError):
            self._read = self._output.stat().st_size
        addresses = own_addresses(interface)[:1] if interface else []
        os.environ[OWNER] = self.links.open(addresses or own_addresses() or [loopback()])
        self._process = subprocess.Popen(argv, stdin=subprocess.DEVNULL)
        self._ended = os.pidfd_open(self._process.pid)
        self.links.serve(self._ended, lambda: None)

    def poll(self) -> bool:
        """Wait at most `POLL_S` and note new ends; returns whether any rank lives."""
        self.links.wait(POLL_S)
        self._note_failures()
        for rank, since in self.links.gone.items():
            if time.monotonic() - since > SETTLE_S:
                self.links.announce(rank)
        gone = self.links.gone if len(self.links.ended) == self.size else {}
        untold_s = time.monotonic() - max(gone.values(), default=math.inf)
        if untold_s > UNTOLD_S:
            # The controller has srun give up what no daemon answers for.
            self.kill("--ctld")
            # For a next start: Slurm goes on to count what the step had.
            os.environ["SLURM_OVERLAP"] = "1"
        return self._process.poll() is None and untold_s < OVER_S

    def _note_failures(self) -> None:
        """Note the ranks of nodes that srun has reported as failed since the last call."""
        with contextlib.suppress(OSError), self._output.open("rb") as file:
            file.seek(self._read)
            text = file.read()
            whole = text.rfind(b"\n") + 1
            self._read += whole
            for node in _FAILED.findall(text[:whole].decode(errors="replace")):
                self.down[node] = f"Slurm set node {node} down{why_down(node)}"
                for rank in [rank for rank, name in self.links.nodes.items() if name == node]:
                    self.links.announce(rank, self.down[node])

    def leave_out(self) -> set[str]:
        """Count the ranks that live as ended; returns their nodes, as far as they have joined."""
        nodes = {rank: self.links.nodes.get(rank, "") for rank in set(range(self.size)) - self.links.ended}
        for rank, node in nodes.items():
            self.down |= {node: f"node {node} is silent, and its processes outlive SIGKILL"} if node else {}
            self.links.gone[rank] = time.monotonic()
        return {*nodes.values()} - {""}

    def signal(self, name: str) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.Signals[f"SIG{name}"])

    def kill(self, option: str = "--signal=KILL") -> None:
        with contextlib.suppress(OSError):
            step = self._step.read_text().strip()
            if step and time.monotonic() - self._killed_at > KILL_AGAIN_S:
                self._killed_at = time.monotonic()
                for name, job in os.environ.items():
                    if name == "SLURM_JOB_ID" or name.startswith("SLURM_JOB_ID_HET_GROUP_"):
                        # It does not answer while a node hangs.
                        send("scancel", option, f"{job}.{step}")

    def close(self) -> list[int]:
        """The exit code of srun, which is not 0 when any rank died; -1 where it has not ended."""
        self.links.close()
        os.close(self._ended)
        with contextlib.suppress(OSError):
            self._step.unlink(missing_ok=True)
        with contextlib.suppress(subprocess.TimeoutExpired):
            return [self._process.wait(CLOSE_S)]
        return [-1]


def ask(*argv: str) -> tuple[int, str]:
    """Exit code and output of a command, one of Slurm but for one; see `on_wait`."""
    began = time.monotonic()
    try:
        process = subprocess.Popen(
            argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True
        )
    except OSError as error:
        return 127, str(error)
    while (waited_s := time.monotonic() - began) < COMMAND_S:
        with contextlib.suppress(subprocess.TimeoutExpired):
            text, _ = process.communicate(timeout=WAIT_S)
            return process.returncode, text
        for note in on_wait:
            note(f"`{os.path.basename(argv[0])}` has not answered for {waited_s + WAIT_S:.0f} s")
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    return 127, f"{argv[0]} did not end within {COMMAND_S:.0f} s"


def send(*argv: str) -> None:
    """Have a command of Slurm do its work, without waiting for its end."""
    subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True)


def job_facts(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables with the job's end and Slurm's ``KillWait``; Slurm before 23.02 has no ``SLURM_JOB_END_TIME``."""
    job, end = environ.get("SLURM_JOB_ID", ""), environ.get("SLURM_JOB_END_TIME", "")
    if not end:
        os.environ["SLURM_TIME_FORMAT"] = "standard"
        code, text = ask("squeue", "--noheader", f"--jobs={job}", "--format=%e")
        end = text.split()[0] if code == 0 and text.split() else ""
    wait = re.search(r"^KillWait\s*=\s*(\d+)", ask("scontrol", "show", "config")[1], re.MULTILINE)
    return {JOB_END: end, KILL_WAIT: wait[1] if wait else ""}


def why_down(node: str) -> str:
    """``: REASON, since TIME``, as Slurm has it of a node; empty where it has none."""
    text = ask("scontrol", "show", "node", "--oneliner", node)[1]
    found = re.search(r"\bReason=(.*?) \[[^]@]*@([^]]*)\]", text)
    return f": {found[1]}, since {found[2].replace('T', ' ')}" if found else ""


class ComponentNow(NamedTuple):
    """What a component of this job has now."""

    nodes: int
    state: str
    """Slurm's word."""


def job_now(environ: Mapping[str, str], without: Collection[str] = ()) -> list[ComponentNow]:
    """The components of this job in order, ``without`` these nodes; empty where Slurm does not list them."""
    code, text = ask("scontrol", "show", "job", "--oneliner", environ.get("SLURM_JOB_ID", ""))
    found = re.findall(r"\bJobState=([A-Z_]+).*\bNodeList=(\S+).*\bNumNodes=(\d+)", text) if code == 0 else []
    names = [ask("scontrol", "show", "hostnames", nodes)[1].split() if without else [] for _, nodes, _ in found]
    parts = zip(found, names, strict=True)
    return [ComponentNow(int(count) - len({*without}.intersection(own)), state) for (state, _, count), own in parts]


def taken_apart(job: Sequence[ComponentNow]) -> bool:
    """Whether Slurm lets some components run, and others not: it keeps a component only where it has a node left."""
    return len({component.state == "RUNNING" for component in job}) > 1


def preempted(environ: Mapping[str, str]) -> bool:
    """Whether Slurm preempted the job.  One that then ends by itself is not queued again by Slurm."""
    words = ask("scontrol", "show", "job", "--oneliner", environ.get("SLURM_JOB_ID", ""))[1].split()
    return any(word.startswith("PreemptTime=") and word[12:13].isdecimal() for word in words)


def requeue(environ: Mapping[str, str]) -> str:
    """Queue the job again; returns why Slurm refuses, else nothing.  Raises `SlurmUnreachable`."""
    code, text = ask("scontrol", "requeue", environ.get("SLURM_JOB_ID", ""))
    # It refuses this for components that it has itself queued again, and does it for the others, which takes a moment.
    if code == 0 or (queued := {component.state in QUEUED for component in job_now(environ)}) == {True}:
        return ""
    if True in queued or any(sign in text for sign in (*TRANSIENT_FAILURES, "timed out")):
        raise SlurmUnreachable(" ".join(text.split()))
    return " ".join(text.split()) or f"scontrol ended with {code}"
