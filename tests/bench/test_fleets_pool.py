"""Calls of the judge over processes: kept and resumed."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from bench.fleets_pool import Calls
from bench.fleets_rows import Fleet, Part
from bench.fleets_training import Planned, Roles

PLAN = Planned((Part(0, 8, 3),), Roles(train=2), 12.25)


def process(number: int) -> int:
    return os.getpid()


def lost(number: int) -> float:
    return math.inf


def planned(number: int) -> Planned:
    return PLAN


def fails(number: int) -> float:
    raise ValueError(number)


def test_a_call_is_made_once_whoever_asks_again(tmp_path: Path) -> None:
    keep = tmp_path / "made" / "calls.jsonl"
    with Calls(2, keep) as first:
        made = list(first.row("r2e").map(process, range(3)))
    with keep.open("a") as file:
        file.write('["half of a li')
    with Calls(1, keep) as again:
        assert list(again.row("r2e").map(process, range(3))) == made
        other = again.row("search").submit(process, 0).result()
        assert other not in made, "another row has other work"
    with Calls(1, keep) as third:
        assert third.row("search").submit(process, 0).result() == other


def test_kept_results_have_their_types(tmp_path: Path) -> None:
    keep = tmp_path / "calls.jsonl"
    for _ in range(2):
        with Calls(1, keep) as calls:
            row = calls.row("r2e")
            assert row.submit(lost, 0).result() == math.inf
            found = row.submit(planned, 0).result()
            assert found == PLAN
            fleet: Fleet = found.fleet
            assert fleet[0].engines == 3


def test_a_call_that_fails_is_not_kept(tmp_path: Path) -> None:
    keep = tmp_path / "calls.jsonl"
    with Calls(1, keep) as calls, pytest.raises(ValueError, match="7"):
        calls.row("r2e").submit(fails, 7).result()
    assert keep.read_text() == ""
