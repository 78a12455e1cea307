"""Calls of the judge over processes: kept, resumed, in order of rows, and ended at the time limit."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path

import pytest

from bench.fleets_pool import Calls, OutOfTimeError
from bench.fleets_rows import Fleet, Part
from bench.fleets_training import Planned, Roles

PLAN = Planned((Part(0, 8, 3),), Roles(train=2), 10.5, 12.25)


def process(number: int) -> int:
    return os.getpid()


def lost(number: int) -> float:
    return math.inf


def planned(number: int) -> Planned:
    return PLAN


def fails(number: int) -> float:
    raise ValueError(number)


def sleeps(seconds: float) -> float:
    time.sleep(seconds)
    return time.monotonic()


def test_a_call_is_made_once_whoever_asks_again(tmp_path: Path) -> None:
    keep = tmp_path / "made" / "calls.jsonl"
    with Calls(2, keep) as first:
        made = list(first.row(0, "r2e").map(process, range(3)))
    with keep.open("a") as file:
        file.write('["half of a li')
    with Calls(1, keep) as again:
        row = again.row(5, "r2e")
        assert list(row.map(process, range(3))) == made
        assert again.made == 0
        other = again.row(0, "search")
        assert other.submit(process, 0).result() not in made, "another row has other work"
    with Calls(1, keep) as third:
        assert third.row(0, "search").submit(process, 0).result() not in made
        assert third.made == 0


def test_kept_results_have_their_types(tmp_path: Path) -> None:
    keep = tmp_path / "calls.jsonl"
    for _ in range(2):
        with Calls(1, keep) as calls:
            row = calls.row(0, "r2e")
            assert row.submit(lost, 0).result() == math.inf
            found = row.submit(planned, 0).result()
            assert found == PLAN
            fleet: Fleet = found.fleet
            assert fleet[0].engines == 3


def test_calls_of_earlier_rows_go_first() -> None:
    with Calls(1) as calls:
        busy = calls.row(0, "r2e").submit(sleeps, 0.2)
        last = calls.row(2, "math").submit(sleeps, 0.0)
        first = calls.row(1, "search").submit(sleeps, 0.0)
        assert busy.result() < first.result() < last.result()


def test_a_call_that_fails_is_not_kept(tmp_path: Path) -> None:
    keep = tmp_path / "calls.jsonl"
    with Calls(1, keep) as calls, pytest.raises(ValueError, match="7"):
        calls.row(0, "r2e").submit(fails, 7).result()
    assert keep.read_text() == ""


def test_at_the_time_limit_everyone_who_waits_is_released_and_finished_calls_are_kept(tmp_path: Path) -> None:
    keep = tmp_path / "calls.jsonl"
    with Calls(1, keep, limit_s=1.0) as calls:
        row = calls.row(0, "r2e")
        done, running, waiting = (row.submit(sleeps, seconds) for seconds in (0.0, 600.0, 601.0))
        for future in (running, waiting):
            with pytest.raises(OutOfTimeError):
                future.result()
        assert calls.over
        with pytest.raises(OutOfTimeError):
            row.submit(sleeps, 602.0).result()
        assert done.result()
    assert len(keep.read_text().splitlines()) == 1
