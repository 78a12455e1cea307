"""Files of the rollout leader: what a full disk costs, and what a start marks as superseded."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from libra_hpc.agent.hosting.rollout_service import RolloutService
from libra_hpc.agent.hosting.storage import Storage
from libra_hpc.facts.journal import Journal, LineLog
from libra_hpc.facts.rundir import RunDir, read_lines
from libra_hpc.protocol.agents import Log
from libra_hpc.protocol.layout import ResumePoint
from libra_hpc.protocol.trace import recorded
from libra_hpc.rollout.recovery.recovery_log import Recovered
from libra_hpc.rollout.trajectory import Trajectory, history
from libra_hpc.traces.read import read_trace
from tests.stage.node_parts import Outbox


def storage_in(folder: Path, events: list[Any], **limit: int) -> tuple[Storage, Journal[int], Journal[int]]:
    trajectories: Journal[int] = Journal(folder / "t.jsonl", lambda n: {"n": n}, 100)
    decisions: Journal[int] = Journal(folder / "d.jsonl", lambda n: {"n": n}, **limit)
    return Storage(trajectories, decisions, lambda kind, **f: events.append((kind, f))), trajectories, decisions


async def test_decisions_beyond_two_files_are_dropped_and_that_is_logged_once(tmp_path: Path) -> None:
    events: list[tuple[str, dict[str, Any]]] = []
    storage, _, decisions = storage_in(tmp_path, events, most=0)
    for n in range(5):
        decisions.add(n)
        await storage.flush(None, [])
        assert len(events) == (n >= 2)
    await storage.close()
    reason = "decisions.jsonl and decisions.jsonl.old have the newest, at most 64 MiB"
    assert events == [("decisions_dropped", {"reason": reason})]


async def test_a_full_disk_costs_decisions_and_is_logged_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[tuple[str, dict[str, Any]]] = []
    full = True

    def append(log: LineLog, lines: bytes, real: Any = LineLog.append) -> None:
        if full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(log, lines)

    monkeypatch.setattr(LineLog, "append", append)
    storage, trajectories, decisions = storage_in(tmp_path, events)
    for n in range(6):
        full = n < 4
        trajectories.add(n)
        decisions.add(n)
        await storage.flush(None, [])
    await storage.close()
    assert [line["n"] for line in read_lines(tmp_path / "t.jsonl")] == [0, 1, 2, 3, 4, 5]
    assert [line["n"] for line in read_lines(tmp_path / "d.jsonl")] == [4, 5]
    assert [(kind, fields.get("part")) for kind, fields in events] == [
        ("decisions_dropped", None),
        ("storage_fault", "trajectories.jsonl"),
        ("storage_ok", "trajectories.jsonl"),
    ]
    assert events[1][1]["reason"] == "trajectories.jsonl cannot be written: No space left on device"


def trace(index: int, sample: int, reward: float = 0.0) -> dict[str, Any]:
    turns = [{"new_tokens": 0, "gen_tokens": 5}]
    return {
        "prompt_id": f"p{index}",
        "sample": sample,
        "prompt_tokens": 1,
        "turns": turns,
        "index": index,
        "reward": reward,
        "finished_at": 1.0,
    }


def recovered(*done: tuple[int, int]) -> Recovered:
    found: dict[int, list[Trajectory]] = {}
    for index, sample in done:
        found.setdefault(index, []).append(Trajectory(index=index, sample=sample))
        found[index][-1].place = "done"
    return Recovered(found, {})


async def test_what_a_start_does_not_go_on_with_is_left_out_by_every_reader(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.write_json(run.config, {})

    async def starts(welcome: ResumePoint, going_on: Recovered) -> None:
        box = Outbox()
        await RolloutService(box.context_of(tmp_path, 2, start=welcome))._supersede(going_on)
        assert not box.of(Log)

    await starts(ResumePoint(0, "", 0, ()), Recovered({}, {}))
    assert not run.trajectories.exists(), "the first start goes back on nothing"
    log = LineLog(run.trajectories)
    log.write_all([trace(0, 0, 0.1), trace(0, 1), trace(1, 0), trace(2, 0), trace(3, 0), trace(4, 0)])
    await starts(ResumePoint(1, "c", 1, (3,)), recovered((2, 0)))
    log.write_all([trace(1, 0, 0.5), trace(4, 0, 0.5), trace(2, 1, 0.5)])
    log._handle.write(b'{"torn')
    await starts(ResumePoint(2, "c", 3, (3,)), recovered())
    log.write_all([trace(4, 0, 0.9)])
    live = [(0, 0, 0.1), (0, 1, 0.0), (2, 0, 0.0), (3, 0, 0.0), (1, 0, 0.5), (2, 1, 0.5), (4, 0, 0.9)]
    assert [(one.index, one.sample, one.reward) for one in recorded(run.trajectories)] == live
    assert [
        (int(one.prompt_id[1:]), one.sample, one.reward)
        for one in read_trace(run.trajectories, skip_bad=True).trajectories
    ] == live
    assert [(int(one.prompt_id[1:]), one.sample) for one in history(run.trajectories, "toy")] == [
        (index, sample) for index, sample, _ in live
    ]
    assert sum("restart" in line for line in read_lines(run.trajectories)) == 2
