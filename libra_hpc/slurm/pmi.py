"""Start one rank under Slurm's ``pmi2`` plugin so that its start-up requests fit the plugin: ``python -m
libra_hpc.slurm.pmi ARGUMENTS OF THE INTERPRETER``.

MPICH speaks PMI-1 to that plugin: text lines over the socket ``PMI_FD``.  Slurm's side reads a request with one
``read`` of `REQUEST_BYTES` but announces values of that same length (``vallen_max``), leaving no room for the rest of
the line, ``cmd=put kvsname=... key=... value=``.  MPICH cuts what it publishes into pieces of the announced length, as
hexadecimal text in which runs of zeros are shortened.  It publishes 4096 bytes from where its network address begins,
so most of it is whatever lies behind that on the heap: when a piece of it happens to hold few zeros, its line is longer
than the read, the value is dropped ("value not properly terminated in client request"), its tail is taken for another
request, and the peers decode zeros ("invalid bandwidth 0.00") or wait for ever.  The same in MPICH's issue 6924.

So a process between the two announces `VALUE_BYTES` instead and passes everything else on.  It is a child of the rank,
because MPI holds the interpreter's lock while it starts.  Whoever does not speak PMI-1 over ``PMI_FD`` (another MPI,
another plugin) is started as it is or passed through untouched.

The child outlives its rank by a moment and notes that rank's end in the file `RunDir.gone`, so that nobody has to wait
for a missing heartbeat.
"""

from __future__ import annotations

import contextlib
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

REQUEST_BYTES = 1024
"""``MAX_READLINE`` of Slurm's ``mpi/pmi2/pmi1.c``, in all its versions."""
VALUE_BYTES = 896
"""Announced length of a value: `REQUEST_BYTES` less 28 for the words of a ``put``, up to 64 for the key
(``keylen_max``) and 36 for Slurm's names of key value spaces, two 32-bit numbers with a point between them."""
MAXES = b"cmd=maxes "
GONE = "LIBRA_HPC_GONE"
"""Variable of a rank: beginning of the file in which its end is noted."""
CHILDREN_LEAVE_S = 5.0
"""Children of a killed agent leave when their socket closes; until then they may still write into its folders."""


def capped(reply: bytes) -> bytes:
    """A reply of the plugin, with a length of values that its own requests can carry."""
    if not reply.startswith(MAXES):
        return reply
    return re.sub(rb"(?<=vallen_max=)\d+", lambda found: str(min(int(found[0]), VALUE_BYTES)).encode(), reply)


def relay(plugin: socket.socket, rank: socket.socket) -> None:
    """Pass requests and replies on until either side closes.

    Each is sent whole, because both sides write a message at once and wait for the answer: the plugin would take half a
    request for all of it.
    """
    with plugin, rank, selectors.DefaultSelector() as selector:
        selector.register(plugin, selectors.EVENT_READ, rank)
        selector.register(rank, selectors.EVENT_READ, plugin)
        while True:
            for key, _ in selector.select():
                source, target = (plugin, rank) if key.data is rank else (rank, plugin)
                try:
                    data = source.recv(65536)
                    target.sendall(capped(data) if source is plugin else data)
                except (BrokenPipeError, ConnectionResetError):
                    return
                if not data:
                    return


def interpose() -> None:
    """Put a relay before ``PMI_FD``, if there is one; only this process returns."""
    number = os.environ.get("PMI_FD", "")
    if not number.isdigit():
        accompany(lambda: None)
        return
    plugin = socket.socket(fileno=int(number))
    ours, theirs = socket.socketpair()

    def pass_on() -> None:
        theirs.close()
        relay(plugin, ours)

    accompany(pass_on)
    plugin.close()
    ours.close()
    theirs.set_inheritable(True)
    os.environ["PMI_FD"] = str(theirs.detach())


def accompany(work: Callable[[], None]) -> None:
    """Fork a companion that does ``work`` and then notes the end of this process; only this process returns."""
    rank = os.getpid()
    if os.fork() != 0:
        return
    # Signals to the step are the rank's business: the companion leaves when the rank has.
    for ignored in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    try:
        # Opened before the work, whose end may be the rank's: afterwards the number could be another process's.
        handle = os.pidfd_open(rank) if os.getppid() == rank else -1
        work()
        note_end(rank, handle)
    finally:
        os._exit(0)


def note_end(rank: int, handle: int) -> None:
    """Wait for the end of process ``rank`` by its pidfd ``handle`` (-1: it has ended), then leave its id in the file
    `GONE` names."""
    if handle >= 0:
        select.select([handle], [], [])
    prefix, number = os.environ.get(GONE, ""), os.environ.get("SLURM_PROCID") or os.environ.get("PMI_RANK", "")
    if prefix and number:
        with contextlib.suppress(OSError), open(prefix + number, "w", encoding="ascii") as file:
            file.write(str(rank))
    if orphans():
        time.sleep(CHILDREN_LEAVE_S)
        remove_orphans()


def main() -> NoReturn:
    """Command line: become the rank."""
    interpose()
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])


if __name__ == "__main__":
    main()
