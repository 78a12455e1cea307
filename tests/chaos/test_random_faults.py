"""Sixty faults of all kinds in one run: it completes, every step once, every group once, and nothing that was saved is
lost."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from libra_hpc.facts.rundir import read_lines
from libra_hpc.slurm.queue.job_record import read_job

from .harness import Chaos, processes, sound

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(1800)]

FAULTS, STEPS = 60, 2500
PLANNER, TRAIN_LEADER, HYBRID, ROLLOUT_LEADER, ROLLOUT = RANKS = range(5)
CHILDREN = [
    (TRAIN_LEADER, "t1.0.json"),
    (HYBRID, "libra_hpc.simulated.engine_process"),
    (ROLLOUT, "libra_hpc.simulated.engine_process"),
    (ROLLOUT_LEADER, "libra_hpc.simulated.host_process"),
    (TRAIN_LEADER, "libra_hpc.weights.carrier"),
    (ROLLOUT, "libra_hpc.weights.carrier"),
]
STOPS_S = (1.0, 3.0, 8.0)
"""Below and above the shortest deadline of the run file."""


class Faults:
    """Faults by name; each leaves the run to recover by itself, but for the owner's death."""

    def __init__(self, case: Chaos, seed: int) -> None:
        self._case, self._draw = case, random.Random(seed)
        self._kinds: dict[str, Callable[[], None]] = {
            "agent killed": self._kill_agent,
            "agent stopped": self._stop_agent,
            "part killed": self._kill_part,
            "part stopped": self._stop_part,
            "shared memory removed": self._remove_memory,
            "owner killed": self._kill_owner,
        }
        self._weights = (3, 3, 6, 4, 2, 1)

    def next(self) -> str:
        """Inject one; returns its kind.  What is gone at the moment of the fault makes it none."""
        (kind,) = self._draw.choices(list(self._kinds), self._weights)
        with contextlib.suppress(OSError, StopIteration, AssertionError):
            self._kinds[kind]()
        return kind

    def _kill_agent(self) -> None:
        self._case.signal_agent(self._draw.choice(RANKS), signal.SIGKILL)

    def _stop_agent(self) -> None:
        self._stop(self._case.agent(self._draw.choice(RANKS)))

    def _kill_part(self) -> None:
        os.kill(self._case.child(*self._draw.choice(CHILDREN)), signal.SIGKILL)

    def _stop_part(self) -> None:
        self._stop(self._case.child(*self._draw.choice(CHILDREN)))

    def _stop(self, pid: int) -> None:
        os.kill(pid, signal.SIGSTOP)
        time.sleep(self._draw.choice(STOPS_S))
        os.kill(pid, signal.SIGCONT)

    def _remove_memory(self) -> None:
        agent = self._case.agent(self._draw.choice((HYBRID, ROLLOUT)))
        for folder in memory_of(agent):
            shutil.rmtree(folder, ignore_errors=True)

    def _kill_owner(self) -> None:
        run = self._case.run
        assert run is not None
        os.kill(read_job(run).pid, signal.SIGKILL)
        self._case.wait(lambda: not processes(run), "its ranks have saved and ended")
        self._case.resume_now()


def memory_of(agent: int) -> list[Path]:
    """Folders in shared memory in which an agent has files open or mapped."""
    links = [Path(f"/proc/{agent}/fd/{name}") for name in os.listdir(f"/proc/{agent}/fd")]
    targets = {Path(os.readlink(link)) for link in links if link.is_symlink()}
    return [
        path.parent for path in targets if path.is_relative_to("/dev/shm") and path.parent.name.startswith("libra-")
    ]


@pytest.mark.parametrize("seed", range(4))
def test_a_run_survives_sixty_random_faults(tmp_path: Path, seed: int) -> None:
    case = Chaos(tmp_path, steps=STEPS)
    streamed = seed % 2 == 1
    synchronous = ("-o", "algorithm.eta=0", "-o", "train.micro_tokens=64") if streamed else ()
    run = case.submit("-o", "slurm.restarts=1000", *synchronous)
    case.reach(3)
    faults, saved = Faults(case, seed), 0
    for _ in range(FAULTS):
        last = case.steps()[-1]
        kind = faults.next()
        case.wait(lambda last=last: case.steps()[-1:] > [last], f"a step after: {kind}")
        newest = run.latest_checkpoint()
        before, saved = saved, newest[0] if newest else 0
        assert saved >= before, "no saved state is lost"
    case.cli("cancel", str(run.path))
    case.ended()
    case.values["steps"] = case.steps()[-1] + 5
    case.resume("-o", f"run.steps={case.values['steps']}")
    sound(case)
    assert any(line.get("train_ahead_s", 0.0) > 0.0 for line in read_lines(run.metrics)) == streamed
