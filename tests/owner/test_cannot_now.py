"""What an owner cannot do now is waited for: processes, files, a network, the lease."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from libra_hpc.facts.rundir import RunDir, read_lines
from libra_hpc.facts.status import read_status

OWNER = """
import os, sys
from libra_hpc.facts import journal
from libra_hpc.owner import owner, owner_records, ranks
from libra_hpc.process import retry
retry.Patience.FIRST_S = owner.EARLY_S = owner.PAUSE_S = 0.05
owner.STATUS_S = 0.2
place, numbers, argv = sys.argv[1], eval(sys.argv[2]), sys.argv[3:]
def failing(real, applies=lambda *arguments: True):
    def call(*arguments, **options):
        if applies(*arguments) and numbers:
            number = numbers.pop(0)
            raise MemoryError if not number else RuntimeError("can't start new thread") if number < 0 else OSError(
                number, os.strerror(number), "/a/file")
        return real(*arguments, **options)
    return call
if place == "start":
    ranks.start_rank = failing(ranks.start_rank, lambda rank, *rest: rank == 1)
elif place == "lease":
    owner.acquire = failing(owner.acquire)
else:
    setattr(owner_records.OwnerRecords, place, failing(getattr(owner_records.OwnerRecords, place)))
owner.main(argv)
"""
"""An owner in which one operation fails some times: place, and numbers of the errors."""
WORLD = """
cd "$0"; unmet=$1; set -- $LIBRA_HPC_OWNER_LINK; echo $4 >> starts
[ $4 = 0 ] || { touch here; exec sleep 0.3; }
while [ ! -e here ]; do sleep 0.02; done
if [ $(grep -c 0 starts) -le $unmet ]; then
  echo '{"why": "unmet", "sentence": "node-3 cannot reach the planner", "step": 0}' > ended.json; exit 1
fi
echo '{"why": "completed", "sentence": "step 60 is saved", "step": 60}' > ended.json
"""
"""Two ranks: they cannot meet in so many starts, then they complete the run."""


WAITS = """
cd "$0"; set -- $LIBRA_HPC_OWNER_LINK; trap 'kill $!; echo $4 >> got; exit 0' TERM; echo $4 >> starts
sleep 60 & wait
"""
"""Two ranks that note SIGTERM and end."""


class Case:
    """A run of 60 steps; with a checkpoint where its ranks have ``met``."""

    def __init__(self, folder: Path, met: bool, longest_s: float) -> None:
        self.run = RunDir.create(folder, "run")
        self.run.logs(1).mkdir(parents=True)
        self.run.write_json(
            self.run.config, {"run": {"steps": 60}, "slurm": {"restarts": 0}, "deadlines": {"cannot_now_s": longest_s}}
        )
        if met:
            self.run.checkpoint(60).mkdir(parents=True)
            (self.run.checkpoint(60) / "state.json").write_text("{}")

    def own(
        self, place: str = "start", numbers: Sequence[int] = (), unmet: int = 0, world: str = WORLD
    ) -> subprocess.Popen[str]:
        owner = ["--run", str(self.run.path), "--attempt", "1", "--size", "2", "--"]
        argv = [sys.executable, "-c", OWNER, place, str(list(numbers)), *owner]
        ranks = ["sh", "-c", world, str(self.run.logs(1)), str(unmet)]
        return subprocess.Popen([*argv, *ranks], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def events(self) -> list[dict[str, Any]]:
        return [event for event in read_lines(self.run.events) if event["kind"] == "cannot_now"]

    def result(self, owner: subprocess.Popen[str], code: int = 0) -> dict[str, Any]:
        self.output = owner.communicate(timeout=60)[0]
        assert owner.returncode == code, self.output
        return self.run.read_json(self.run.result)


UNSAVED = """
set -- $LIBRA_HPC_OWNER_LINK; [ $4 = 0 ] || exit 0
cd "$0"; echo '{"why": "storage", "sentence": "the disk is full", "step": 146}' > ended.json; exit 1
"""


def test_the_result_has_the_step_that_is_saved_and_the_metrics_all_steps_until_it(tmp_path: Path) -> None:
    case = Case(tmp_path, True, 60.0)
    reports = [{"step": step, "t": 100.0 + step, "metrics": {"reward": 0.5, "loss": None}} for step in (58, 59, 60)]
    case.run.write_json(case.run.checkpoint(60) / "state.json", {"reports": reports})
    case.run.metrics.write_text('{"step": 57}\n{"step": 58}\n')
    result = case.result(case.own(world=UNSAVED), 1)
    assert (result["state"], result["message"], result["step"]) == ("failed", "the disk is full", 60)
    rows = [{"t": float(100 + step), "step": step, "reward": 0.5} for step in (59, 60)]
    assert [*read_lines(case.run.metrics)] == [{"step": 57}, {"step": 58}, *rows]


NUMBERS = [errno.ENOSPC, errno.EAGAIN, errno.EMFILE, errno.ENOMEM, errno.ESTALE, errno.EIO, errno.EROFS, 0]


@pytest.mark.parametrize(("numbers", "met"), [(NUMBERS, False), ([errno.ENOENT, errno.EACCES], True)])
def test_a_rank_that_cannot_be_started_now_is_started_later(tmp_path: Path, numbers: list[int], met: bool) -> None:
    case = Case(tmp_path, met, 60.0)
    assert case.result(case.own("start", numbers))["state"] == "completed"
    for number in numbers:
        why = f"{os.strerror(number)} (/a/file)" if number else "MemoryError"
        assert f"repeat: the ranks cannot be started: {why}\n" in case.output
    (event,) = case.events()
    assert event["reason"] == f"the ranks cannot be started: {os.strerror(numbers[0])} (/a/file)"
    assert (case.run.logs(1) / "starts").read_text().split().count("1") == 1, "ranks of a start that failed are ended"


@pytest.mark.parametrize("place", ["end", "position", "clear"])
def test_a_run_directory_that_cannot_be_read_or_written_now_is_waited_for(tmp_path: Path, place: str) -> None:
    case = Case(tmp_path, met=True, longest_s=60.0)
    assert case.result(case.own(place, [errno.ESTALE, errno.EIO, errno.ENOENT]))["state"] == "completed"
    assert os.strerror(errno.ESTALE) in case.events()[0]["reason"]


def test_a_lease_that_cannot_be_taken_now_is_taken_later(tmp_path: Path) -> None:
    case = Case(tmp_path, met=False, longest_s=60.0)
    assert case.result(case.own("lease", [errno.ENOSPC, errno.ESTALE, -1]))["state"] == "completed"


def test_ranks_that_met_before_and_do_not_now_start_again_without_using_a_restart(tmp_path: Path) -> None:
    case = Case(tmp_path, met=True, longest_s=60.0)
    assert case.result(case.own(unmet=5))["state"] == "completed"
    (event,) = case.events()
    assert event["reason"] == "start 1: the agents did not meet; node-3 cannot reach the planner"


def test_what_stays_impossible_ends_the_run_with_its_cause_what_is_saved_and_how_to_go_on(tmp_path: Path) -> None:
    how = "for 1 s; step 60 is saved; continue with `libra-hpc submit --resume run-001`"
    for place, number, before in (
        ("start", errno.EMFILE, "the ranks cannot be started: "),
        ("end", errno.EIO, "/a/file cannot be read: "),
        ("lease", errno.ENOSPC, "the run does not start: its lease cannot be taken: "),
    ):
        (tmp_path / place).mkdir()
        case = Case(tmp_path / place, met=True, longest_s=1.0)
        result = case.result(case.own(place, [number] * 1000), 1)
        file = "" if place == "end" else " (/a/file)"
        assert result["message"] == f"{before}{os.strerror(number)}{file}, {how}"
        assert (result["state"], result["step"]) == ("failed", 60)


def test_the_status_names_what_is_waited_for_and_a_signal_ends_the_wait(tmp_path: Path) -> None:
    case = Case(tmp_path, met=True, longest_s=600.0)
    owner, began = case.own("start", [errno.EAGAIN] * 1000), time.monotonic()
    while (status := read_status(case.run, 1)) is None or time.time() - status.updated_at > 0.5:
        assert time.monotonic() - began < 30.0
        time.sleep(0.05)
    assert status.state == "restarting"
    assert status.message.startswith("waiting since ")
    assert status.message.endswith(
        ", for 600 s at most: the ranks cannot be started: Resource temporarily unavailable (/a/file)"
    )
    os.kill(owner.pid, signal.SIGTERM)
    assert case.result(owner, 1)["state"] == "cancelled"
    assert time.monotonic() - began < 60.0


NOTHING = (signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF, signal.SIGQUIT, signal.SIGRTMIN + 3)
"""Signals that mean nothing to an owner."""


@pytest.mark.parametrize(("before", "last"), [((), signal.SIGHUP), ((signal.SIGUSR2, *NOTHING), signal.SIGTERM)])
def test_a_signal_to_the_owner_is_one_to_the_run_and_what_means_nothing_is_named(
    tmp_path: Path, before: Sequence[int], last: int
) -> None:
    case = Case(tmp_path, met=False, longest_s=60.0)
    owner, starts = case.own(world=WAITS), case.run.logs(1) / "starts"
    while not starts.exists() or len(starts.read_text().split()) < 2:
        time.sleep(0.02)
    for number in (*before, last):
        os.kill(owner.pid, number)
        time.sleep(0.2)
    assert case.result(owner, 1)["state"] == "cancelled"
    assert sorted((case.run.logs(1) / "got").read_text().split()) == ["0", "1"]
    assert ("most recent call first" in case.output) is bool(before)
    for number in NOTHING if before else ():
        assert f"signal {int(number)} ({signal.strsignal(number)}) means nothing here, and is ignored\n" in case.output
