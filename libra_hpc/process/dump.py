"""Stacks of all threads on request: a process that hangs writes them into its log before it is ended.

Signals that mean nothing to a process of the run, and would end it, are named in its log instead.
"""

from __future__ import annotations

import faulthandler
import signal

DUMP_SIGNAL = signal.SIGUSR2
"""SIGTERM and SIGUSR1 are Slurm's; this one is free."""

STRAY = (
    *(signal.SIGQUIT, signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF, signal.SIGPOLL, signal.SIGPWR, signal.SIGXCPU),
    *range(signal.SIGRTMIN, signal.SIGRTMAX + 1),
)
"""They end a process by default, and no process of a run expects one."""


def stray_words(number: int) -> str:
    """How a log names one that came."""
    return f"signal {number} ({signal.strsignal(number)}) means nothing here, and is ignored"


def dump_on_request() -> None:
    """Write the stacks of all threads to stderr at `DUMP_SIGNAL`, also while the interpreter is blocked."""
    faulthandler.register(DUMP_SIGNAL, all_threads=True)
