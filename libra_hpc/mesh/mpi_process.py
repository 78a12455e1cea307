"""The MPI process of one agent: it meets the others, then carries frames of rank 0 to all.

Started by `MpiLink` as a child of the agent, which never loads MPI itself.

- It has met the others -> ``M`` to the agent.
- ``F`` frame at rank 0 -> it goes to each peer by `Isend`, and ``A`` is the answer to its agent.
- A frame comes from rank 0 -> ``F`` frame to the agent; nothing here reads it.
- ``D`` index -> no more is sent to this peer: sending to a dead one ends this process (UCX) or hangs it (libfabric).
- Its agent ends -> the kernel ends it, also while it hangs inside MPI.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

from libra_hpc.process.entry import DUMP_SIGNAL, STRAY
from libra_hpc.process.reaper import die_with
from libra_hpc.protocol.codec import LENGTH, Codec, EngineSocket

from .mpi_library import mpich_chosen

Packet = tuple[bytes, bytes]
"""Kind and content."""
PACKETS: Codec[Packet] = Codec(Packet)
TAG = 7
IDLE_S, BUSY_S = 0.02, 0.002
"""Between two probes, the shorter for `RECENT_S` after a frame: idle 0.5 % of a core. Half: twice that."""
RECENT_S = 1.0
PROBES = 8
"""In a row: one reads only a part of a message."""


def main() -> None:
    """Command line."""
    agent: EngineSocket[Packet] = EngineSocket(int(sys.argv[1]), PACKETS, PACKETS)
    die_with(int(sys.argv[2]))
    # It is in the agent's group, whose signals are for the agent.
    for ignored in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP, DUMP_SIGNAL, *STRAY):
        signal.signal(ignored, signal.SIG_IGN)
    import mpi4py

    mpi4py.rc.initialize = False
    with mpich_chosen():
        from mpi4py import MPI
    MPI.Init_thread(MPI.THREAD_SINGLE)
    comm = MPI.COMM_WORLD
    if comm.Get_size() != int(os.environ["PMI_SIZE"]):
        sys.exit("this MPI does not start by PMI-1, as MPICH does: it has met nobody")
    agent.send((b"M", b""))
    _carry(agent, comm, MPI)


def _carry(agent: EngineSocket[Packet], comm: Any, mpi: Any) -> None:
    """Carry frames until the agent closes."""
    first = comm.Get_rank() == 0
    peers, sends, status, last = set(range(1, comm.Get_size())), list[Any](), mpi.Status(), 0.0
    while True:
        recent = bool(sends) or time.monotonic() - last < RECENT_S
        if (request := agent.receive(BUSY_S if recent else IDLE_S)) is not None:
            (kind, content), last = request, time.monotonic()
            if kind == b"D":
                peers.discard(LENGTH.unpack(content)[0])
            else:
                sends += [comm.Isend([content, mpi.BYTE], dest=peer, tag=TAG) for peer in peers]
                agent.send((b"A", b""))
        sends = [send for send in sends if not send.Test()]
        for _ in range(0 if first else PROBES):
            if comm.Iprobe(0, TAG, status):
                frame = bytearray(status.Get_count(mpi.BYTE))
                comm.Recv([frame, mpi.BYTE], 0, TAG)
                agent.send((b"F", bytes(frame)))
                last = time.monotonic()


if __name__ == "__main__":
    try:
        main()
    except EOFError:
        os._exit(0)
