"""The common entry point of simulated engines and trainers: command line and exit codes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from libra_hpc.errors import UserError
from libra_hpc.process.dump import dump_on_request


def run(module: str, description: str, arguments: list[str] | None, work: Callable[[str, Path], None]) -> int:
    """Parse the command line and do ``work(socket, config)``.

    Exit codes: 0 after `StopEngine` or without the agent, 2 for a user's mistake (one sentence on stderr).
    """
    parser = argparse.ArgumentParser(prog=f"python -m libra_hpc.simulated.{module}", description=description)
    parser.add_argument("--socket", required=True, help="Unix-domain socket the agent listens on")
    parser.add_argument("--config", required=True, type=Path, help="JSON file, as the process it stands for would get")
    options = parser.parse_args(arguments)
    dump_on_request()
    try:
        work(options.socket, options.config)
    except (EOFError, ConnectionError):
        return 0
    except UserError as error:
        print(f"libra-hpc: {error}", file=sys.stderr)
        return error.exit_code
    return 0
