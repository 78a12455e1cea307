"""Run one Slurm client command with an explicit environment, and turn what it says into our errors.

A busy controller answers late or not at all for a moment; such failures are retried with a doubling pause.  A query may
be repeated; a submission may not, because its answer can get lost after the job was queued.
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
)
FIRST_PAUSE_S = 0.5
"""Doubles with every retry: 0.5, 1 s."""
TRIES = 3
TIMEOUT_S = 20.0
"""Of one try.  Slurm's clients themselves go on trying for one to two minutes when the controller is gone: too long
for a person who waits."""
WAYS_OUT = "start the embedded one with `libra-hpc cluster up`, or run without Slurm with `--executor local`"


class SlurmRefused(OperationError):
    """Slurm understood the command and declined; the message is Slurm's own, without its program prefix."""


def call(
    argv: Sequence[str],
    env: Mapping[str, str],
    *,
    tries: int = TRIES,
    timeout_s: float = TIMEOUT_S,
    with_errors: bool = False,
) -> str:
    """Standard output of a Slurm command run with environment ``env``; ``tries`` is 1 for what must not be done twice.
    ``with_errors``: and its error output, where some commands answer.

    Raises `SlurmUnreachable` when the command does not exist or the controller does not answer after ``tries``,
    `SlurmRefused` on any other failure.
    """
    program = shutil.which(argv[0], path=env.get("PATH", ""))
    if program is None:
        raise SlurmUnreachable(f"The command {argv[0]} was not found; {WAYS_OUT}.")
    said = ""
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
            said = f"no answer within {timeout_s:.0f} s"
            continue
        if done.returncode == 0:
            return done.stdout + done.stderr if with_errors else done.stdout
        said = complaint(done.stderr) or f"exit code {done.returncode}"
        if not any(sign in said for sign in TRANSIENT_FAILURES):
            raise SlurmRefused(said)
    raise SlurmUnreachable(f"Slurm does not answer {argv[0]} ({said}); {WAYS_OUT}.")


def complaint(stderr: str) -> str:
    """What a Slurm command said, on one line: ``sbatch: error:`` and the like removed, repetitions dropped."""
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
