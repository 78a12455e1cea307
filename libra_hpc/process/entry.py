"""How a child process of an agent begins and ends: ``--socket FD --config FILE``.

- A mistake of the user, or what cannot be done -> one sentence on stderr, and the exit code of that.
- `leave` -> the process ends at once, without Python taking itself apart.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from libra_hpc.errors import OperationError, UserError

from .dump import dump_on_request


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
