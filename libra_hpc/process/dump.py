"""Stacks of all threads on request: a process that hangs writes them into its log before it is ended."""

from __future__ import annotations

import faulthandler
import signal

DUMP_SIGNAL = signal.SIGUSR2
"""SIGTERM and SIGUSR1 are Slurm's; this one is free."""


def dump_on_request() -> None:
    """Write the stacks of all threads to stderr at `DUMP_SIGNAL`, also while the interpreter is blocked."""
    faulthandler.register(DUMP_SIGNAL, all_threads=True)
