"""How a child process of an agent begins and ends (``--socket FD --config FILE``), and what signals mean to it.

- A mistake of the user, or what cannot be done -> one sentence on stderr, and the exit code of that.
- `leave` -> the process ends at once, without Python taking itself apart.
- `DUMP_SIGNAL` -> the stacks of all threads are in its log: a process that hangs writes them before it is ended.
- Signals that mean nothing to a process of the run, and would end it, are named in its log instead.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from libra_hpc.errors import OperationError, UserError

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


def run(module: str, work: Callable[[int, Path], int], arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and return the exit code of ``work(socket, config)``."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}")
    parser.add_argument("--socket", required=True, type=int, help="descriptor of the socket to the agent")
    parser.add_argument("--config", required=True, type=Path, help="JSON file with what the process needs")
    options = parser.parse_args(arguments)
    os.set_inheritable(options.socket, False)
    dump_on_request()
    try:
        return work(options.socket, options.config)
    except (UserError, OperationError) as error:
        print(f"libra-hpc: {error}", file=sys.stderr)
        return error.exit_code


def leave(code: int) -> NoReturn:
    """End this process with an exit code; what was printed is written.

    With torch and vLLM in memory a regular end takes one to five seconds on a busy core, for which a cancelled or
    repartitioned run waits.  What must be closed has been closed; memory, devices and sockets go with the process.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
