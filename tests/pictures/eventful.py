"""Make the run directory of an eventful run: three starts, hours in the queue, moves, lost engines, hostile texts."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from libra_hpc.config.load import validate
from libra_hpc.facts.rundir import RunDir
from libra_hpc.facts.status import encode_status
from libra_hpc.files import write_atomic
from tests.facts.synthetic import layout_lines, make_status, write

BEGIN = 1_790_000_000.0
STEP_S = 3.0
QUEUE_S = 6 * 3600.0
"""Between the two jobs; the run itself takes minutes."""
RESTART_S = 20.0
HOSTILE = "<script>document.title = 'taken'</script><img src=x onerror=\"document.title = 'taken'\">"
SECRET = "sk-very-secret"
JUDGE = "https://judge.example/v1"
NODES = {0: "planner", 1: "train", 2: "hybrid", 3: "rollout"}


def make_eventful_run(parent: Path, steps: int = 120) -> RunDir:
    """Write a run that was cancelled; its first half ended with a job, a quarter of it with a restart."""
    run = RunDir.create(parent, "eventful")
    values: dict[str, Any] = {"run": {"steps": 2 * steps}, "compute": {"env": {"SERVICE_KEY": SECRET}}}
    values["task"] = {"name": "keychain", "options": {"judge": JUDGE, "mode": "fast", "limits": [7, 9]}}
    values["slurm"] = {"extra": ["--comment=pw_token=abcdefg"]}
    values["compute"]["setup"] = ["module load cuda", "export HF_TOKEN='hf 123456'"]
    values |= {"model": {"path": f"/models/{HOSTILE}"}, "algorithm": {"eta": 2}}
    values["components"] = {
        name: {"nodes": 1, "gpus": 8, "gpu_type": "a800"} for name in ("train", "hybrid", "rollout")
    }
    run.write_json(run.config, validate(values).as_data())
    run.write_json(run.job, {"job_id": "4712", "executor": "slurm", "attempt": 2, "submitted_at": BEGIN - 60.0})
    write(run.metrics, *_steps(steps))
    write(run.events, *_events(steps))
    write(run.layouts, *_layouts(steps))
    status = make_status(run, state="cancelled", step=steps)
    write_atomic(run.status, encode_status(msgspec.structs.replace(status, attempt=2, message=HOSTILE)))
    return run


def time_of(step: int, steps: int) -> float:
    """When a step was committed; step 0: the end of the start of the ranks."""
    waits = RESTART_S * (step > steps // 4) + QUEUE_S * (step > steps // 2)
    return BEGIN + 10.0 + STEP_S * step + waits


def _steps(steps: int) -> Iterator[dict[str, Any]]:
    rng = random.Random(1)
    speeds = {"train_tokens_per_s": 81_000.0, "rollout_tokens_per_s": 9_500.0, "step_s": STEP_S}
    for step in range(1, steps + 1):
        drifted = step > 0.6 * steps
        reward = 0.3 + 0.5 * (1 - math.exp(-5 * step / steps)) - 0.15 * drifted + rng.gauss(0.0, 0.04)
        yield {
            "t": time_of(step, steps),
            "step": step,
            "reward": reward,
            "train_s": 1.1 + 0.2 * rng.random() + 0.9 * drifted,
            "rollout_s": 1.9 + 0.3 * rng.random() - 0.4 * drifted,
            "wait_s": 0.4 * rng.random(),
            "staleness_mean": 0.7 + 0.3 * rng.random(),
            "gen_tokens_p50": 400 + 200 * drifted + 30 * rng.random(),
            "gen_tokens_p95": 1500 + 600 * drifted + 200 * rng.random(),
            "changed_share": 0.03,
            "weights_mb": 800.0,
            "weights_dense_mb": 16_400.0,
            **{name: rng.random() for name in ("diff_s", "wire_s", "stage_s", "pause_s", "update_s")},
            "after_drift": float(drifted),
        } | {"tokens": 90_000, "loss_tokens": 20_000, "staleness_max": 2.0, "expected_s": 1.08 * STEP_S, **speeds}


def _events(steps: int) -> Iterator[dict[str, Any]]:
    first, half, end = time_of(steps // 4, steps), time_of(steps // 2, steps), time_of(steps, steps)
    yield from _start(BEGIN, 1)
    yield {"t": BEGIN + 12, "kind": "decision", "action": "hold", "node": -1, "reason": f"hold: {HOSTILE}"}
    yield {"t": BEGIN + 15, "kind": "held", "looks": 7, "reason": "hold: too little is measured"}
    moved = BEGIN + 10.0 + STEP_S * (steps // 8)
    reason = "to_train: moving node 2 to train takes a batch from 2.30 s to 1.70 s; that is 0.41 s (18%) at least"
    decision = {"action": "to_train", "node": 2, "nodes": [2], "predicted_gain_s": 0.6}
    yield {"t": moved, "kind": "decision", "reason": reason, **decision}
    yield {"t": moved + 0.1, "kind": "move_started", "rank": 2, "to": "train", "reason": reason}
    yield {"t": moved + 6.0, "kind": "move_done", "rank": 2, "role": "train", "seconds": 5.9}
    gains = {"predicted_gain_s": 0.6, "realised_gain_s": 0.47}
    yield {"t": moved + 20.0, "kind": "move_judged", "rank": 2, "to": "train", **gains}
    yield {"t": first, "kind": "restart", "reason": "node 1, which leads training, was lost", "restarts": 1, "step": 3}
    yield from _start(first + 12.0, 1)
    yield {"t": half - 5.0, "kind": "engine_lost", "rank": 3, "engine": "r3.0", "reason": HOSTILE}
    yield {"t": half - 3.0, "kind": "engine_ready", "rank": 3, "engine": "r3.0", "version": 4, "seconds": 2.0}
    yield {"t": half + 1.0, "kind": "job_finished", "state": "cancelled", "message": "step 60 is saved", "step": 60}
    yield from _start(half + QUEUE_S - 5.0, 2)
    for number in range(3):
        failure = {"failure": "raised", "error": f"KeyError: {HOSTILE}"}
        yield {"t": end - 9 + number, "kind": "trajectory_failed", "trajectory": f"{number}.0.0", **failure}
    yield {"t": end - 5, "kind": "stop_requested", "signal": "SIGTERM"}
    yield {"t": end, "kind": "checkpoint_saved", "step": steps}
    yield {"t": end + 1.0, "kind": "job_finished", "state": "cancelled", "message": HOSTILE, "step": steps}


def _layouts(steps: int) -> Iterator[dict[str, Any]]:
    nodes, moved = {1: "train", 2: "rollout", 3: "rollout"}, BEGIN + 10.0 + STEP_S * (steps // 8)
    yield from layout_lines((BEGIN, nodes), (moved, {**nodes, 2: "to_train"}), (moved + 6.0, {**nodes, 2: "train"}))
    for t in (time_of(steps // 4, steps) + 12.0, time_of(steps // 2, steps) + QUEUE_S - 5.0):
        yield from layout_lines((t + 0.1, dict.fromkeys(nodes, "starting")), (t + 5.0, {**nodes, 2: "lost"}))


def _start(t: float, attempt: int) -> Iterator[dict[str, Any]]:
    for rank, component in NODES.items():
        yield {"t": t + 0.01 * rank, "kind": "agent_joined", "rank": rank, "component": component, "host": f"gpu{rank}"}
    yield {"t": t + 0.1, "kind": "job_started", "ranks": len(NODES), "step": 0, "attempt": attempt}
