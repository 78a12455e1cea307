"""Start one rank under Slurm's ``pmi2`` plugin with a relay that keeps MPI's start-up requests short enough.

``python -m libra_hpc.slurm.pmi ARGUMENTS OF THE INTERPRETER`` becomes the rank.

- MPICH sends PMI-1 text lines over the socket ``PMI_FD``.  Slurm reads each with one ``read`` of `REQUEST_BYTES`.
- Slurm announces values of that same length (``vallen_max``), so a full line is longer than the read.  The value is
  lost, and the peers decode zeros or wait for ever (docs/log; MPICH's issue 6924).
- The relay announces `VALUE_BYTES` instead and passes everything else on.  It is a child process of the rank, because
  MPI holds the interpreter's lock while it starts.
- Another MPI or another plugin -> no relay, or everything passes unchanged.
- The rank has its connection to the run's owner before it is the agent (`call_owner`), so that no end goes unnoticed.
"""

from __future__ import annotations

import os
import re
import select
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import NoReturn

from libra_hpc.process.agent_folders import orphans, remove_orphans
from libra_hpc.process.child_environment import of_rank
from libra_hpc.process.entry import DUMP_SIGNAL, STRAY
from libra_hpc.process.owner_link import call_owner

REQUEST_BYTES = 1024
"""``MAX_READLINE`` of Slurm's ``mpi/pmi2/pmi1.c``, in all its versions."""
VALUE_BYTES = 896
"""Announced length of a value: `REQUEST_BYTES` less 28 for the words of a ``put``, 64 for the longest key
(``keylen_max``) and 36 for the name of a key-value space, two 32-bit numbers with a point between them."""
MAXES = b"cmd=maxes "
ABORT = b"cmd=abort"
"""Swallowed: Slurm would kill the agents of all ranks for one MPI process."""
CHILDREN_LEAVE_S = 5.0
"""Seconds for children of a killed agent to end; until then they may still write into its folders."""


def capped(reply: bytes) -> bytes:
    """A reply of the plugin with at most `VALUE_BYTES` announced as the length of values."""
    if not reply.startswith(MAXES):
        return reply
    return re.sub(rb"(?<=vallen_max=)\d+", lambda found: str(min(int(found[0]), VALUE_BYTES)).encode(), reply)


def relay(plugin: socket.socket, rank: socket.socket) -> None:
    """Pass requests and replies on, each in one send, until either side closes.

    The plugin would take half a request for all of it.
    """
    with plugin, rank, selectors.DefaultSelector() as selector:
        selector.register(plugin, selectors.EVENT_READ, rank)
        selector.register(rank, selectors.EVENT_READ, plugin)
        while True:
            for key, _ in selector.select():
                source, target = (plugin, rank) if key.data is rank else (rank, plugin)
                try:
                    data = source.recv(65536)
                    if not data.startswith(ABORT):
                        target.sendall(capped(data) if source is plugin else data)
                except (BrokenPipeError, ConnectionResetError):
                    return
                if not data:
                    return


def interpose(link: int) -> None:
    """Put a relay between this process and ``PMI_FD``, if that is set; the child process never returns.

    ``link``: descriptor of this process's connection to the owner, which the child must not hold open.
    """
    number = os.environ.get("PMI_FD", "")
    if not number.isdigit():
        accompany(link, lambda: None)
        return
    plugin = socket.socket(fileno=int(number))
    ours, theirs = socket.socketpair()

    def pass_on() -> None:
        theirs.close()
        relay(plugin, ours)

    accompany(link, pass_on)
    plugin.close()
    ours.close()
    theirs.set_inheritable(True)
    os.environ["PMI_FD"] = str(theirs.detach())


def accompany(link: int, work: Callable[[], None]) -> None:
    """Fork a child that does ``work``, and ends what this process leaves; the child never returns."""
    rank = os.getpid()
    if os.fork() != 0:
        return
    if link >= 0:
        os.close(link)
    # Signals to the step are for the rank: this child ends after the rank has.
    for ignored in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP, DUMP_SIGNAL, *STRAY):
        signal.signal(ignored, signal.SIG_IGN)
    try:
        # Opened before the work: after it the rank may be gone, and its id may be another process's.
        handle = os.pidfd_open(rank) if os.getppid() == rank else -1
        work()
        if handle >= 0:
            select.select([handle], [], [])
        if orphans():
            time.sleep(CHILDREN_LEAVE_S)
            remove_orphans()
    finally:
        os._exit(0)


def main() -> NoReturn:
    """Command line: become the rank."""
    interpose(call_owner(int(os.environ.get("SLURM_PROCID", "-1")), os.environ.get("SLURMD_NODENAME", "")))
    os.execve(sys.executable, [sys.executable, *sys.argv[1:]], of_rank(os.environ))


if __name__ == "__main__":
    main()
