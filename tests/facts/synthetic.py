"""Make the run directory of a finished run: 60 steps, a drift half-way, one moving node, one killed engine."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from libra_hpc.config.run import RunConfig
from libra_hpc.facts.journal import LineLog
from libra_hpc.facts.layout_log import layout_line
from libra_hpc.facts.rundir import RunDir
from libra_hpc.facts.status import (
    BucketStatus,
    DecisionStatus,
    FailedAttempts,
    NodeStatus,
    StageEstimate,
    StageStatus,
    Status,
    StepAccuracy,
    encode_status,
)
from libra_hpc.files import write_atomic
from libra_hpc.protocol.agents import LenderReport
from libra_hpc.protocol.layout import Layout, Row
from libra_hpc.protocol.layout_changes import LayoutHistory

START = 1_700_000_000.0
STEPS = 60
DRIFT_STEP = 30
STEP_S = 3.0
MOVE = (START + 100.0, START + 109.5)
REASON = "to_train: training 1.42 s a batch, rollout 0.97 s; moving node 2 saves 31 s over 300 s and costs 9.5 s"
COMPONENTS = ("planner", "train", "hybrid", "rollout")
PAUSED = {"served": 187.0, "silent": 12.0}
LENDERS: list[tuple[Any, ...]] = [
    ("gpu-017-vllm-4711", "lender", 1, 0.62, 0.58, 1_204, 310_220, PAUSED, "served"),
    ("t-001", "idle", 8, 1.0, 1.0, 20_412, 9_310_220),
    ("t-104", "spot", 0, 0.0, 0.9, 2_412, 910_220),
]
BEFORE_DRIFT = {"generation": 1, "replicas": 1, "rollout_nodes": 2, "after_drift": 0.0}
EVERY_STEP = (
    {"reward_std": 0.3, "tokens": 1000, "loss_tokens": 400, "loss": 0.01, "grad_norm": 0.5, "wait_s": 0.3}
    | {"staleness_mean": 0.5, "staleness_max": 1, "train_tokens_per_s": 900.0, "rollout_tokens_per_s": 350.0}
    | {"step_s": STEP_S}
)


def make_run(parent: Path, name: str = "quick") -> RunDir:
    """Write every file of a completed run and return it."""
    run = RunDir.create(parent, name)
    run.write_json(run.config, RunConfig().as_data())
    run.write_json(run.job, {"job_id": "4711", "executor": "slurm", "attempt": 1, "submitted_at": START - 5})
    write_metrics(run)
    why = "to_train: training takes 2.3 s a batch, rollout 2.1 s"
    gains = {"predicted_gain_s": 0.42, "realised_gain_s": 0.31}
    recovered = {"trajectories": 24, "generated_tokens": 2_320, "unfinished": 3, "unfinished_tokens": 80, "dropped": {}}
    write(
        run.events,
        event(START, "job_started"),
        *(event(START + 1, "agent_joined", rank=i, component=c, host=f"node{i}") for i, c in enumerate(COMPONENTS)),
        event(MOVE[0], "move_started", rank=2, to="train", reason=why),
        event(MOVE[1], "move_done", rank=2, role="train", seconds=9.5),
        event(MOVE[1] + 20, "move_judged", rank=2, to="train", **gains),
        event(START + 140, "engine_lost", rank=3, engine="v0"),
        event(START + 140, "resubmitted", trajectory="a", reason="engine lost"),
        *(failed(number, kind) for number, kind in enumerate(("raised", "raised", "timeout"))),
        event(START + 144, "admission_paused", reason="because"),
        event(START + 145, "prompt_given_up", index=7, prompt="p", reason="because"),
        event(START + 147, "engine_ready", rank=3, engine="v0"),
        event(START + 148, "experience_kept", **recovered),
        event(START + 150, "checkpoint_saved", step=50),
        event(START + 181, "job_finished", state="completed"),
    )
    nodes = {1: "train", 2: "rollout", 3: "rollout"}
    moved = [(t, {**nodes, 2: state}) for t, state in zip(MOVE, ("to_train", "train"), strict=True)]
    write(run.layouts, *layout_lines((START + 1, nodes), *moved))
    turns = [{"new_tokens": 0, "gen_tokens": 20}, {"new_tokens": 0, "gen_tokens": 30}]
    record = {"prompt_id": "p", "sample": 0, "prompt_tokens": 1, "turns": turns}
    write(
        run.trajectories, *({**record, "started_at": START, "finished_at": START + i, "index": i} for i in range(180))
    )
    result = {"state": "completed", "message": "step 60 is saved", "step": 60, "attempt": 1, "t": START + 181}
    run.write_json(run.result, result)
    write_atomic(run.status, encode_status(make_status(run, state="completed")))
    return run


def layout_lines(*moments: tuple[float, dict[int, str]]) -> Iterator[dict[str, Any]]:
    """Times and states of the nodes in one start."""
    history = LayoutHistory()
    for t, states in moments:
        before = history.layout.number
        history.put(Layout(rows={rank: Row(state, "rollout") for rank, state in states.items()}))
        yield layout_line(t, history.since(before), {})


def write(path: Path, *lines: dict[str, Any]) -> None:
    """Append lines to a log."""
    log = LineLog(path)
    log.write_all(lines)
    log.close()


def failed(number: int, failure: str) -> dict[str, Any]:
    """The second one stands for ten of its kind."""
    attempt = {"trajectory": f"{number}.0.0", "task": "data", "prompt": "p", "error": f"KeyError: {number}"}
    return event(START + 141 + number, "trajectory_failed", failure=failure, unsaid=9 * (number == 1), **attempt)


def event(t: float, kind: str, **fields: Any) -> dict[str, Any]:
    """A line of the log of events."""
    return {"t": t, "kind": kind, **fields}


def write_metrics(run: RunDir) -> None:
    """Write the metrics of every step."""
    rng = random.Random(0)
    metrics = LineLog(run.metrics)
    for step in range(1, STEPS + 1):
        drifted = step > DRIFT_STEP
        dip = 0.15 * math.exp(-(step - DRIFT_STEP) / 8) if drifted else 0
        reward = 0.25 + 0.5 * (1 - math.exp(-step / 15)) - dip + rng.gauss(0, 0.03)
        train_s, rollout_s = 1.0 + rng.random() * 0.2 + (1.2 if drifted else 0), 2.0 + rng.random() * 0.3
        place = {"generation": 2, "replicas": 2, "rollout_nodes": 1, "after_drift": 1.0} if drifted else BEFORE_DRIFT
        times = {"train_s": train_s, "rollout_s": rollout_s, "expected_s": None if step < 4 else 1.1 * STEP_S}
        row = {"t": START + STEP_S * step, "step": step, "version": step, "reward": reward, "solved": reward}
        metrics.write({**row, **times, **place, **EVERY_STEP})
    metrics.close()


def make_status(run: RunDir, *, state: str = "running", step: int = STEPS, nodes: int = 4) -> Status:
    """A snapshot of the same run; the nodes beyond the first four roll out."""
    facts: list[tuple[str, str, dict[str, str], int, float]] = [
        ("planner", "planner", {}, -1, 0.1),
        ("train", "train", {"t1.0": "ready"}, 41, 0.4),
        ("hybrid", "to_train", {"t2.0": "starting", "r2.0": "standby"}, 40, 0.2),
        ("rollout", "rollout", {"c3": "ready", "r3.0": "ready", "r3.1": "lost"}, 41, 7.5),
    ]
    for rank in range(len(facts), nodes):
        facts.append(("rollout", "rollout", {f"r{rank}.{number}": "ready" for number in range(8)}, 41, 0.3))
    return Status(
        run=run.name,
        path=str(run.path),
        job_id="4711",
        attempt=1,
        state=state,
        started_at=START,
        updated_at=START + STEP_S * step,
        step=step,
        steps=STEPS,
        version=step,
        train=StageStatus(912.4, 1.42, 0.93, 1),
        rollout=StageStatus(2345.6, 0.97, 0.61, 2),
        numbers={
            "reward": 0.71,
            "generation": 2,
            "replicas": 1,
            "open_trajectories": 57,
            "waiting_turns": 3,
            "tools_running": 4,
            "ready_groups": 2,
            "staleness_mean": 0.48,
            "staleness_max": 1,
            "resubmitted": 8,
            "trained_trajectories": 2_624,
        },
        buckets=[
            BucketStatus(tp=1, engines=2, inflight=31, trajectories=57, kv_use=0.42),
            BucketStatus(tp=2, engines=1, inflight=4, trajectories=6, kv_use=0.08),
        ],
        nodes=[NodeStatus(rank, f"a800-0{rank + 1}", *fact) for rank, fact in enumerate(facts)],
        decision=DecisionStatus("to_train", 2, REASON, {"gain_s": 31.0}, at=START + STEP_S * step - 12),
        message="",
        estimate=StageEstimate(3.2, 0.91, 3.2),
        accuracy=StepAccuracy(8, 3.31, 3.0, 0.103),
        failures=[FailedAttempts("raised", 12, "KeyError: 'x'"), FailedAttempts("timeout", 3, "late")],
        lenders=[LenderReport(*facts) for facts in LENDERS],
    )
