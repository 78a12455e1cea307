"""``job.json`` of a run directory: the job that carries the run, and how it was started."""

from __future__ import annotations

import re
import secrets
from typing import Literal

import msgspec

from libra_hpc.errors import UserError
from libra_hpc.facts.rundir import RunDir
from libra_hpc.files import write_atomic

MARK = "libra-hpc:"
"""Beginning of what a job's comment has of us."""


def new_mark() -> str:
    """What the comment of one job has, and of no other."""
    return f"{MARK}{secrets.token_hex(8)}"


def mark_in(comment: str) -> str:
    """The mark in a comment, which a site may have put more into; empty without one."""
    return "".join(re.findall(rf"{MARK}\w*", comment)[-1:])


class JobRecord(msgspec.Struct, frozen=True):
    """The last submission of a run."""

    executor: Literal["slurm", "local"]
    job_id: str
    """Slurm job id, or ``local-<pid>``."""
    attempt: int
    submitted_at: float
    """Epoch seconds."""
    cluster: str = ""
    """Slurm only: the cluster that has the job."""
    elsewhere: bool = False
    """Slurm only: sbatch was asked for that cluster, and so are all queries."""
    pid: int = 0
    """Local only: process id and group of the launcher."""
    started: int = 0
    """Local only: kernel start time of that process in clock ticks; a later process of the same id has another."""
    cancelled: bool = False
    """Local only: the user cancelled it."""
    name: str = ""
    """Slurm only: the job's name, and in its comment `new_mark`; empty in records of before there was one."""
    mark: str = ""

    @property
    def asked(self) -> str:
        """The cluster that Slurm's commands must name; empty: none."""
        return self.cluster if self.elsewhere else ""


_decoder = msgspec.json.Decoder(JobRecord)


def write_job(run: RunDir, record: JobRecord) -> None:
    """Write the record, replacing an earlier one."""
    write_atomic(run.job, msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n")


def read_job(run: RunDir) -> JobRecord:
    """Read the record; raises `UserError` when the run was never submitted, or when it cannot be read."""
    try:
        return _decoder.decode(run.job.read_bytes())
    except FileNotFoundError:
        raise UserError(f"{run.path} was never submitted: it has no {run.job.name}.") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"{run.job} is damaged: {error}.") from None
    except OSError as error:
        raise UserError(f"{run.job} cannot be read ({error.strerror}).") from None


def start_attempt(run: RunDir, attempt: int) -> None:
    """Make the log folder of a new attempt and remove the result of the last one."""
    run.logs(attempt).mkdir(parents=True, exist_ok=True)
    run.result.unlink(missing_ok=True)
    run.stop.unlink(missing_ok=True)
