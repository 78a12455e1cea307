"""Rank 0's writer: what survives a full disk, and that nothing is written twice."""

from __future__ import annotations

import contextlib
import errno
import json
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from libra_hpc.facts import fact_writer
from libra_hpc.facts.fact_writer import FactsWriter
from libra_hpc.facts.rundir import RunDir, read_lines
from libra_hpc.facts.status import encode_status, read_status

from . import synthetic


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(tmp_path)], capture_output=True
    ).returncode:
        pytest.skip("file systems may not be mounted here")
    yield tmp_path
    subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def fill(disk: Path) -> None:
    """Leave no free block."""
    with (disk / "filler").open("wb", buffering=0) as filler, contextlib.suppress(OSError):
        while True:
            filler.write(bytes(4096))


def until(condition: Callable[[], object]) -> None:
    while not condition():
        time.sleep(0.01)


def test_lines_come_in_order_and_the_newest_status_stays(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.logs(1).mkdir(parents=True)
    facts = FactsWriter(run, 1)
    for number in range(100):
        facts.event({"kind": "x", "n": number})
        facts.step({"step": number + 1})
        facts.layout({"number": number})
        facts.status(b'{"n": %d}' % number)
    facts.end(b'{"why": "completed"}')
    assert facts.close(10.0) == ""
    assert [line["n"] for line in read_lines(run.events)] == list(range(100))
    assert [line["step"] for line in read_lines(run.metrics)] == list(range(1, 101))
    assert [line["number"] for line in read_lines(run.layouts)] == list(range(100))
    assert facts.recorded == 100
    assert json.loads(run.status.read_bytes()) == {"n": 99}
    assert run.read_json(run.ended(1)) == {"why": "completed"}
    names = sorted(path.name for path in tmp_path.iterdir() if not path.name.startswith("."))
    assert names == ["events.jsonl", "layouts.jsonl", "logs", "metrics.jsonl", "status.json"]


def test_a_full_disk_keeps_lines_in_memory_and_shows_the_status_all_the_same(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of the product, the pauses between two tries add up to half a minute.
    monkeypatch.setattr(fact_writer, "RETRY_S", 0.05)
    monkeypatch.setattr(fact_writer, "RETRY_MOST_S", 0.1)
    run = RunDir(disk)
    facts = FactsWriter(run, 1)
    facts.step({"step": 1})
    until(lambda: facts.recorded == 1)
    fill(disk)
    for step in range(2, 300):
        facts.step({"step": step, "text": "x" * 200})
    until(lambda: facts.fault)
    assert facts.fault == f"No space left on device ({run.metrics})"
    for number in range(5):
        facts.status(b'{"message": "storage fault %d"}' % number)
        until(lambda number=number: run.read_json(run.status) == {"message": f"storage fault {number}"})
    (disk / "filler").unlink()
    until(lambda: not facts.waiting)
    assert facts.close(10.0) == ""
    assert [line["step"] for line in read_lines(run.metrics)] == list(range(1, 300)), "each line once, none lost"
    assert all(json.loads(line) for line in run.metrics.read_bytes().splitlines()), "no torn line stays in the file"


def test_the_status_of_a_thousand_nodes_is_shown_on_a_full_disk(disk: Path) -> None:
    run = RunDir(disk)
    nodes = {"train": 256, "rollout": 767, "planner": 1}
    run.write_json(run.config, {"components": {name: {"nodes": count} for name, count in nodes.items()}})
    facts = FactsWriter(run, 1)
    assert facts.flush(10.0)
    fill(disk)
    for step in range(3):
        status = synthetic.make_status(run, step=step, nodes=1024)
        assert len(encode_status(status)) > 200_000
        facts.status(encode_status(status))
        until(lambda status=status: run.read_json(run.status) == json.loads(encode_status(status)))
    assert len(read_status(run, 1).nodes) == 1024


def test_without_hard_links_the_status_is_shown_on_a_full_disk_as_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "status.json"
    reserve = fact_writer.Reserve(path, 1000)
    for place in (fact_writer.os, "link"), (fact_writer, "write_atomic"):
        monkeypatch.setattr(*place, Mock(side_effect=OSError(errno.EDQUOT, "Disk quota exceeded")))
    for number in range(5):
        reserve.write(b'{"n": %d}' % number)
        assert json.loads(path.read_bytes()) == {"n": number}


def test_the_end_is_written_on_a_full_disk(disk: Path) -> None:
    run = RunDir(disk)
    run.logs(1).mkdir(parents=True)
    facts = FactsWriter(run, 1)
    fill(disk)
    facts.event({"kind": "x"})
    facts.end(b'{"why": "storage", "sentence": "No space left on device"}')
    assert "No space" in facts.close(10.0)
    assert run.read_json(run.ended(1))["why"] == "storage"


def test_nothing_is_written_once_another_owner_has_the_run(tmp_path: Path) -> None:
    run, taken = RunDir(tmp_path), [""]
    facts = FactsWriter(run, 1, lambda: taken[0])
    facts.event({"kind": "x"})
    assert facts.flush(10.0)
    taken[0] = "another owner has the run"
    facts.event({"kind": "y"})
    facts.status(b"{}")
    assert facts.close(10.0) == ""
    assert [line["kind"] for line in read_lines(run.events)] == ["x"]
    assert not run.status.exists()


def test_a_record_that_cannot_be_a_line_stops_no_other(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    facts = FactsWriter(run, 1)
    facts.event({"t": 1.0, "kind": "x", "reason": "\ud800"})
    facts.event({"t": 2.0, "kind": "y"})
    assert facts.close(10.0) == ""
    first, second = read_lines(run.events)
    assert (first["t"], second["kind"]) == (1.0, "y")
    assert "ud800" in first["unwritable"]
