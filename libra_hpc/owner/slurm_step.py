"""The ranks of one MPI world as a step of this Slurm job, and what Slurm's commands say of the job.

- A signal to the batch script -> the ranks, by ``srun``.
- A rank ends -> `libra_hpc.slurm.pmi` writes a file `RunDir.gone`; all have -> ``srun`` ends.
- ``srun`` itself is never killed: its step would stay and hold the nodes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence

from libra_hpc.facts.rundir import RunDir
from libra_hpc.protocol.ranks_stop import JOB_END, KILL_WAIT
from libra_hpc.slurm.writer import STEP

POLL_S = 0.5
"""Most seconds between two checks for ended ranks."""
KILL_AGAIN_S = 10.0
"""Between two SIGKILLs to a step: the first may come before Slurm has all its tasks."""
COMMAND_S = 60.0
"""For a command of Slurm, while its controller is busy."""


class SlurmStep:
    """All ranks of a start; ``argv`` is srun's command line."""

    def __init__(self, run: RunDir, attempt: int, size: int, argv: Sequence[str]) -> None:
        self._gone, self._step = run.gone(attempt), run.logs(attempt) / STEP
        self._step.unlink(missing_ok=True)
        self.size, self.gone = size, set[int]()
        self._killed_at = float("-inf")
        self._process = subprocess.Popen(argv, stdin=subprocess.DEVNULL)

    def poll(self) -> bool:
        """Wait at most `POLL_S` and note new ends; returns whether any rank lives."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(POLL_S)
        with contextlib.suppress(OSError):
            names = [path.name.removeprefix(self._gone.name) for path in self._gone.parent.glob(f"{self._gone.name}*")]
            self.gone = {int(name) for name in names if name.isdecimal()}
        return self._process.poll() is None

    def signal(self, name: str) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.Signals[f"SIG{name}"])

    def kill(self) -> None:
        with contextlib.suppress(OSError):
            step = self._step.read_text().strip()
            if step and time.monotonic() - self._killed_at > KILL_AGAIN_S:
                self._killed_at = time.monotonic()
                for name, job in os.environ.items():
                    if name == "SLURM_JOB_ID" or name.startswith("SLURM_JOB_ID_HET_GROUP_"):
                        ask_slurm("scancel", "--signal=KILL", f"{job}.{step}")

    def close(self) -> list[int]:
        """The exit code of srun, which is not 0 when any rank died."""
        self._step.unlink(missing_ok=True)
        return [self._process.wait()]


def ask_slurm(*argv: str) -> tuple[int, str]:
    """Exit code and output of a command of Slurm."""
    try:
        done = subprocess.run(
            argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", timeout=COMMAND_S
        )
    except (OSError, subprocess.SubprocessError) as error:
        return 127, str(error)
    return done.returncode, done.stdout


def job_facts(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables with the job's end and Slurm's ``KillWait``; Slurm before 23.02 has no ``SLURM_JOB_END_TIME``."""
    job, end = environ.get("SLURM_JOB_ID", ""), environ.get("SLURM_JOB_END_TIME", "")
    if not end:
        os.environ["SLURM_TIME_FORMAT"] = "standard"
        code, text = ask_slurm("squeue", "--noheader", f"--jobs={job}", "--format=%e")
        end = text.split()[0] if code == 0 and text.split() else ""
    settings = dict(
        line.replace(" ", "").split("=", 1)
        for line in ask_slurm("scontrol", "show", "config")[1].splitlines()
        if "=" in line
    )
    wait = "".join(filter(str.isdecimal, settings.get("KillWait", "")))
    return {JOB_END: end, KILL_WAIT: wait}


def preempted(environ: Mapping[str, str]) -> bool:
    """Whether Slurm preempted the job.  One that then ends by itself is not queued again by Slurm."""
    words = ask_slurm("scontrol", "show", "job", "--oneliner", environ.get("SLURM_JOB_ID", ""))[1].split()
    return any(word.startswith("PreemptTime=") and word[12:13].isdecimal() for word in words)


def requeue(environ: Mapping[str, str]) -> str:
    """Queue the job again; returns why Slurm refuses, else nothing."""
    code, text = ask_slurm("scontrol", "requeue", environ.get("SLURM_JOB_ID", ""))
    return "" if code == 0 else " ".join(text.split()) or f"scontrol ended with {code}"
