"""A peer that dies or hangs in a step, on any device: what tests on the CPU and on two GPUs share."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

from libra_hpc.protocol.trainer import Join, Joined, StepDone, StepFailed

from .batches import train_step
from .support import WAIT_S, Replica, join_all, step_all


def steps_without_the_lost_peer(
    base: Path, model_dir: Path, fate: signal.Signals, *, core: dict[str, Any], replica: dict[str, Any]
) -> tuple[Replica, list[StepDone]]:
    """Three steps, in the second of which the core's peer is lost; returns the core and its answers.

    No timeout helps: they are longer than the test. A peer that is stopped keeps its sockets open, as one does whose
    node no longer answers, and as every peer does for NCCL within a node.
    """
    never = 10 * WAIT_S
    first = Replica(base, "core", model_dir, step_timeout_s=never, join_timeout_s=never, **core)
    second = Replica(base, "peer", model_dir, step_timeout_s=never, join_timeout_s=never, elastic=True, **replica)
    for each in (first, second):
        each.ready()
    join_all([first, second], 1, base / "g1")
    done = [step_all([first, second], 1, 1)[0]]
    second.processes[0].send_signal(signal.SIGSTOP)
    for rank, each in enumerate((first, second)):
        each.send(train_step(2, 1, replica=rank, replicas=2))
    while not first.alive(0).waits:
        pass
    second.processes[0].send_signal(fate)
    # What the coordinator orders when it misses the peer.
    first.send(Join(2, 0, 1, str(base / "g2")))
    assert first.receive(StepFailed).step == 2
    assert first.receive(Joined).step == 1
    done += [step_all([first], step, 2)[0] for step in (2, 3)]
    second.kill()
    return first, done
