"""File systems that answer late, with an error, or never, under the states of a run."""

from __future__ import annotations

import errno
import time
from pathlib import Path

import pytest

from .conftest import FaultyFiles
from .harness import Chaos, sound, standstill

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]


def test_a_write_that_hangs_is_ended_after_storage_s_and_training_goes_on(tmp_path: Path, faulty: FaultyFiles) -> None:
    checkpoints = tmp_path / "runs" / "t-001" / "checkpoints"
    case = Chaos(tmp_path, steps=400)
    faulty.set(checkpoints, "fsync", seconds=-1)
    case.submit("-o", "deadlines.storage_s=8")
    case.wait(lambda: case.events("checkpoint_saved"), "a checkpoint at the usual speed")
    faulty.left(1)
    case.wait(lambda: case.events("slow"), "a write that is late")
    step = case.steps()[-1]
    case.wait(lambda: case.steps()[-1] > step, "steps meanwhile")
    case.wait(lambda: case.events("hung"), "the end of the write")
    faulty.left(0)
    sound(case)
    (hung,) = case.events("hung")
    assert "write of a saved state has not ended after" in hung["reason"]
    assert "(limit 8 s)" in hung["reason"]
    assert case.events("slow")[0]["t"] < hung["t"] < case.events("engine_lost")[0]["t"]


NUMBERS = (errno.EMFILE, errno.ENFILE, errno.ENOENT, errno.EIO, errno.ENOMEM, errno.EACCES, errno.ESTALE)
FLOOR_S, START_S, QUIET_S = 4.0, 16.0, 3.0
"""Of the run file; of a child, beside others on two cores; a child without such a call for so long makes none."""
PROGRAMS = ("simulated.engine_process", "simulated.trainer_process", "simulated.host_process", "weights.carrier")


@pytest.mark.parametrize("call", ["open", "read", "mmap", "connect"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_call_of_a_child_that_fails_once_costs_at_most_its_start(
    tmp_path: Path, faulty: FaultyFiles, program: str, call: str
) -> None:
    case, waits = Chaos(tmp_path, steps=4000), {}
    faulty.set(Path("/"), call, program=f"libra_hpc.{program}")
    run = case.submit("-o", "deadlines.restarts=20", "-o", "slurm.restarts=20")
    case.reach(5)
    for number in NUMBERS:
        step, began = case.steps()[-1], time.time()
        faulty.left(1, number)
        case.wait(lambda began=began: faulty.spent or time.time() > began + QUIET_S, "the call")
        faulty.left(0)
        case.wait(lambda step=step: case.steps()[-1] > step + 2, "steps after it")
        waits[errno.errorcode[number]] = standstill(run, began)
    assert max(waits.values()) <= FLOOR_S + START_S, waits
    case.cli("cancel", str(run.path))
    sound(case, "cancelled")
