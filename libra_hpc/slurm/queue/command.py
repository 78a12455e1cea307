"""Run one Slurm client command with an explicit environment; its failures become our errors.

- The controller does not answer (`TRANSIENT_FAILURES`, or no answer in time) -> retry with a doubling pause.
- The command is a submission -> one try: its answer can get lost after the job was queued.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence

from libra_hpc.errors import OperationError, SlurmUnreachable

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
