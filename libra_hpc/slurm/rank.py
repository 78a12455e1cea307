"""Start one rank under Slurm.

``python -m libra_hpc.slurm.rank ARGUMENTS OF THE INTERPRETER`` becomes the rank.

- The rank has its connection to the run's owner before it is the agent (`call_owner`), so that no end goes unnoticed.
- It is killed -> a child of it ends what it leaves.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from typing import NoReturn

from libra_hpc.process.agent_folders import orphans, remove_orphans
from libra_hpc.process.entry import DUMP_SIGNAL, STRAY
from libra_hpc.process.owner_link import call_owner

CHILDREN_LEAVE_S = 5.0
"""Seconds for children of a killed agent to end; until then they may still write into its folders."""


def accompany(link: int) -> None:
    """Fork a child that ends what this process leaves; the child never returns.

    ``link``: descriptor of this process's connection to the owner, which the child must not hold open.
    """
    rank = os.getpid()
    if os.fork() != 0:
        return
    if link >= 0:
        os.close(link)
    # Signals to the step are for the rank: this child ends after the rank has.
    for ignored in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP, DUMP_SIGNAL, *STRAY):
        signal.signal(ignored, signal.SIG_IGN)
    try:
        if os.getppid() == rank:
            select.select([os.pidfd_open(rank)], [], [])
        if orphans():
            time.sleep(CHILDREN_LEAVE_S)
            remove_orphans()
    finally:
        os._exit(0)


def main() -> NoReturn:
    """Command line: become the rank."""
    accompany(call_owner(int(os.environ.get("SLURM_PROCID", "-1")), os.environ.get("SLURMD_NODENAME", "")))
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])


if __name__ == "__main__":
    main()
