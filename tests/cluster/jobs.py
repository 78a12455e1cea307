"""What the single-job tests run."""

from __future__ import annotations

import os
import signal


def add(left: int, right: int) -> tuple[int, str]:
    """The sum, and the node that computed it."""
    print("adding", flush=True)
    return left + right, os.environ.get("SLURMD_NODENAME", "")


def fail() -> None:
    """Raise."""
    raise ValueError("the function's own words")


def die() -> None:
    """End without a result."""
    os.kill(os.getpid(), signal.SIGKILL)
