"""Run one Slurm client command with an explicit environment; its failures become our errors.

- The controller does not answer (`TRANSIENT_FAILURES`, or no answer in time) -> retry with a doubling pause.
- The command is a submission -> one try: its answer can get lost after the job was queued.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from libra_hpc.errors import OperationError, SlurmUnreachable
from libra_hpc.process.child_environment import LAUNCHER

TRANSIENT_FAILURES = (
    "Unable to contact slurm controller",
    "Unable to establish a configuration source",
    "Could not establish a configuration source",
    "Connection refused",
    "Connection timed out",
    "Socket timed out",
    "Zero Bytes were transmitted",
    "Transport endpoint",
    "temporarily unable",
    "Problem talking to the database",
    # A file system that hangs for a moment has it.
    "Unable to process configuration file",
)
FIRST_PAUSE_S = 0.5
"""Pause before the first retry, in seconds.  It doubles with every retry."""
TRIES = 3
TIMEOUT_S = 20.0
"""Seconds of one try.  Slurm's clients would try for one to two minutes: too long for a person who waits."""
WAYS_OUT = "load the cluster's Slurm module, or start the embedded one with `libra-hpc cluster up`"


class SlurmRefused(OperationError):
    """Slurm refused the command; the message is Slurm's own, without its program prefix."""


class SlurmSilent(SlurmUnreachable):
    """Slurm did not answer a command; whether the command was carried out is open."""


def call(
    argv: Sequence[str],
    env: Mapping[str, str],
    *,
    tries: int = TRIES,
    timeout_s: float = TIMEOUT_S,
    with_errors: bool = False,
) -> str:
    """Standard output of a Slurm command; ``tries`` is 1 for what must not be done twice.

    ``with_errors``: and its error output, where some commands answer.

    Raises `SlurmUnreachable` when the command does not exist, `SlurmSilent` when the controller does not answer,
    `SlurmRefused` on any other failure.
    """
    program = shutil.which(argv[0], path=env.get("PATH", ""))
    if program is None:
        raise SlurmUnreachable(f"The command {argv[0]} was not found; {WAYS_OUT}.")
    reason = ""
    for attempt in range(tries):
        if attempt:
            time.sleep(FIRST_PAUSE_S * 2 ** (attempt - 1))
        try:
            done = subprocess.run(
                [program, *argv[1:]],
                env=dict(env),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                # A job's comment is any bytes.
                errors="replace",
                timeout=timeout_s,
            )
        except subprocess.TimeoutExpired:
            reason = f"no answer within {timeout_s:.0f} s"
            continue
        if done.returncode == 0:
            return done.stdout + done.stderr if with_errors else done.stdout
        reason = complaint(done.stderr) or f"exit code {done.returncode}"
        if not any(sign in reason for sign in TRANSIENT_FAILURES):
            raise SlurmRefused(reason)
    raise SlurmSilent(f"Slurm does not answer {argv[0]} ({reason}); {WAYS_OUT}.")


def complaint(stderr: str) -> str:
    """A Slurm command's error output in one line, without prefixes such as ``sbatch: error:`` and repetitions."""
    lines: list[str] = []
    for line in stderr.splitlines():
        text = line.strip()
        head, mark, rest = text.partition(": ")
        if mark and head.startswith("s") and head.isalpha():
            text = rest
        text = text.removeprefix("error: ").removeprefix("fatal: ").strip()
        if text and text not in lines:
            lines.append(text)
    return "; ".join(lines).rstrip(".")


PING_TIMEOUT_S = 15.0
CLIENTS = "clients.json"
"""File of the embedded cluster while it is up: search paths of its client commands, by variable."""
ALLOWED = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT")
"""Slurm variables that are passed on: where the controller is, and who we are."""
DROPPED = ("SLURM", "SBATCH_", "SRUN_", "SALLOC_", "SQUEUE_", "SACCT_", "SINFO_", "SCANCEL_", "SCONTROL_")
"""Prefixes of job variables and client defaults."""


def clean_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Copy of ``environ`` without job variables, client defaults and launcher leftovers."""
    return {
        name: value for name, value in environ.items() if name in ALLOWED or not name.startswith(DROPPED + LAUNCHER)
    }


def controller_answers(env: Mapping[str, str]) -> bool:
    """Whether ``scontrol ping`` with the environment ``env`` finds a controller that is up."""
    try:
        answer = call(["scontrol", "ping"], env, tries=1, timeout_s=PING_TIMEOUT_S)
    except OperationError:
        return False
    # A backup controller may be the one that is up.
    return any(line.startswith("Slurmctld(") and line.rstrip().endswith("UP") for line in answer.splitlines())


def embedded_home() -> Path:
    """Folder of the embedded cluster: ``$LIBRA_HPC_CLUSTER``, or ``~/.libra-hpc/cluster``."""
    return Path(os.environ.get("LIBRA_HPC_CLUSTER") or Path.home() / ".libra-hpc" / "cluster").absolute()


def embedded_environment(home: Path, env: Mapping[str, str]) -> dict[str, str] | None:
    """``env`` with the client commands of the embedded cluster in ``home``; None: it is not up."""
    try:
        paths: dict[str, str] = json.loads((home / CLIENTS).read_bytes())
    except (OSError, ValueError):
        return None
    found = {name: os.pathsep.join(filter(None, (path, env.get(name, "")))) for name, path in paths.items()}
    return {**env, **found, "SLURM_CONF": str(home / "etc" / "slurm.conf")}


def slurm_environment(home: Path | None = None) -> dict[str, str]:
    """Environment for Slurm's client commands; ``home`` is the embedded cluster's folder, None: the default.

    Raises `SlurmUnreachable` when no controller answers.
    """
    env = clean_environment(os.environ)
    if controller_answers(env):
        return env
    if named := env.get("SLURM_CONF"):
        raise SlurmUnreachable(
            f"SLURM_CONF = {named!r}: no Slurm controller answers there; valid: the slurm.conf of one that is up, or"
            " unset SLURM_CONF to use the embedded Slurm (`libra-hpc cluster up`)."
        )
    embedded = embedded_environment(home or embedded_home(), env)
    if embedded is not None and controller_answers(embedded):
        return embedded
    why = "" if shutil.which("scontrol", path=env.get("PATH", "")) else " (scontrol is not on PATH)"
    raise SlurmUnreachable(f"No Slurm controller answers{why}; {WAYS_OUT}.")
