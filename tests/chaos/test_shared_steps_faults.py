"""Thirty faults while nodes change their stage within a step: the run goes on, trains nothing twice, and keeps its
staleness bound."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest

from libra_hpc.facts.rundir import RunDir, read_lines
from tests.cluster.runs import trained_once

from .harness import SHARING_PAYS, Chaos, patched, sound

pytestmark = pytest.mark.chaos

FAULTS, STEPS = 30, 2500
STOPS_S = (1.0, 3.0)
"""Below the shortest deadline of the run file."""
TAIL_BYTES = 1 << 15
"""Of the events, in which every node's last state is."""
KEYS = {
    "components.train.roll_out": "true",
    "planner.enabled": "true",
    "planner.time_sharing": "auto",
    "planner.switch_cost_s": 20.0,
    "rollout.max_inflight": 4,
    "slurm.restarts": 1000,
    "train.micro_tokens": 64,
    "planner.interval_s": 20.0,
    "simulated.speedup": 20.0,
    "simulated.wake_s": 20.0,
}
LINKS = """
import random, signal, socket
def cut(number, frame):
    links = []
    for name in os.listdir("/proc/self/fd"):
        try:
            link = socket.socket(fileno=os.dup(int(name)))
            if link.family == socket.AF_INET and link.getpeername():
                links.append(link)
        except OSError:
            continue
    if links:
        random.choice(links).shutdown(socket.SHUT_RDWR)
signal.signal(signal.SIGUSR2, cut)
"""
"""An agent that cuts one of its connections upon SIGUSR2."""


class Faults:
    def __init__(self, case: Chaos, ranks: Sequence[int], seed: int) -> None:
        """All ``ranks`` roll out, and all but the last one train."""
        self._case, self._ranks, self._draw = case, ranks, random.Random(seed)
        self._kinds: tuple[Callable[[], None], ...] = (self.engine, self.trainer, self.stall, self.link)

    def next(self) -> str:
        """Inject one; returns its kind.  What is gone at the moment of the fault makes it none."""
        kind = self._draw.choice(self._kinds)
        with contextlib.suppress(OSError, StopIteration, AssertionError):
            kind()
        return kind.__name__

    def engine(self) -> None:
        rank = self._draw.choice(self._ranks)
        os.kill(self._case.child(rank, f"r{rank}.0.json"), signal.SIGKILL)

    def trainer(self) -> None:
        rank = self._draw.choice(self._ranks[:-1])
        os.kill(self._case.child(rank, f"t{rank}.0.json"), signal.SIGKILL)

    def stall(self) -> None:
        agent = self._case.agent(self._draw.choice(self._ranks))
        os.kill(agent, signal.SIGSTOP)
        time.sleep(self._draw.choice(STOPS_S))
        os.kill(agent, signal.SIGCONT)

    def link(self) -> None:
        self._case.signal_agent(self._draw.choice(self._ranks), signal.SIGUSR2)


def switching(run: RunDir) -> bool:
    """Whether a node changes its stage."""
    with run.layouts.open("rb") as handle:
        handle.seek(max(0, handle.seek(0, os.SEEK_END) - TAIL_BYTES))
        lines = map(msgspec.json.decode, handle.read().split(b"\n")[1:-1])
    states = {rank: row[0] for line in lines for rank, row in line.get("rows", {}).items()}
    return any(state in ("to_train", "to_rollout") for state in states.values())


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("eta", [0, 1])
def test_a_run_in_time_sharing_survives_thirty_faults_during_switches(tmp_path: Path, eta: int) -> None:
    case, ranks = Chaos(tmp_path, steps=STEPS, hybrid=2, rollout=1), range(1, 5)
    run = case.submit(
        *(word for key, value in (KEYS | {"algorithm.eta": eta}).items() for word in ("-o", f"{key}={value}")),
        *patched(case.folder, LINKS + SHARING_PAYS, 0, *ranks),
    )
    case.reach(3)
    faults = Faults(case, ranks, seed=eta)
    for _ in range(FAULTS):
        case.wait(lambda: switching(run), "a switch within a step")
        last = case.steps()[-1]
        kind = faults.next()
        case.wait(lambda last=last: case.steps()[-1:] > [last], f"a step after: {kind}")
    case.cli("cancel", str(run.path))
    case.ended()
    case.values["steps"] = case.steps()[-1] + 5
    case.resume("-o", f"run.steps={case.values['steps']}")
    sound(case)
    assert max(line["staleness_max"] for line in read_lines(run.metrics)) <= eta
    trained_once(run, case.values["steps"])
