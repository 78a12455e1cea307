"""A run on engines of two tensor-parallel degrees at once: every turn a decision on record, both classes in use, the
record replayable."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from libra_hpc.annexes.devcluster.cluster import ClusterInfo
from libra_hpc.facts.rundir import read_lines

from .runs import ENGINE_MARKS, Case, trained_once

pytestmark = [*ENGINE_MARKS, pytest.mark.nightly]

STEPS = 24


def status(case: Case) -> dict[str, Any]:
    """What `libra-hpc status --json` shows."""
    assert case.run is not None
    shown: dict[str, Any] = json.loads(case.cli("status", str(case.run.path), "--json").stdout)["status"]
    return shown


def test_engines_of_tp_1_and_tp_2_serve_one_run(cluster: ClusterInfo, policy: Path, tmp_path: Path) -> None:
    case = Case(tmp_path, policy, "slurm", steps=STEPS, hybrid=0, rollout=2, tp=[1, 2])
    # One turn at a time at each engine, so that no class alone can take them all.
    run = case.submit("-o", "rollout.max_inflight=1", "-o", "deadlines.floor_s=600")
    # An engine of two processes starts much later than one of one; without a trainer the run waits for it at the
    # staleness bound.
    case.wait(lambda: case.events("member_joined"), "the trainer")
    trainer = case.child(1, "libra_hpc.trainer.worker")
    os.kill(trainer, signal.SIGSTOP)
    try:
        case.wait(
            lambda: {event["engine"] for event in case.events("engine_ready")} >= {"r2.0", "r3.0"}, "both engines"
        )
        case.wait(lambda: len(status(case)["buckets"]) == 2, "both buckets in the status")
    finally:
        os.kill(trainer, signal.SIGCONT)
    case.wait(
        lambda: {line["engine"] for line in read_lines(run.decisions)} == {"r2.0", "r3.0"}, "turns at both engines"
    )
    buckets = status(case)["buckets"]
    assert [(bucket["tp"], bucket["engines"]) for bucket in buckets] == [(1, 1), (2, 1)]
    assert case.ended() == "completed"
    trained_once(run, STEPS)
    count = STEPS * 4 * 4
    case.wait(
        lambda: len(list(read_lines(run.trajectories))) == count,
        "all trajectories, written by the rollout leader as the run ended",
    )

    decisions = list(read_lines(run.decisions))
    assert {(line["engine"], line["level"]) for line in decisions} >= {("r2.0", 0), ("r3.0", 1)}
    assert all(line["reason"] and line["numbers"] and line["waited_s"] >= 0.0 for line in decisions)
    sent = {(line["trajectory"], line["turn"]): line["engine"] for line in decisions}
    finished = list(read_lines(run.trajectories))
    for line in finished:
        name = f"{line['index']}.{line['sample']}.{line['attempt']}"
        assert [turn["engine"] for turn in line["turns"]] == [
            sent[name, number] for number in range(len(line["turns"]))
        ]
        assert line["prompt_tokens"] > 0
        assert line["turns"][0]["new_tokens"] == 0
        assert all(turn["gen_tokens"] > 0 and turn["outcome"] for turn in line["turns"][:-1])
    assert max(line["staleness_max"] for line in read_lines(run.metrics)) <= 1
