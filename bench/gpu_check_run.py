"""A whole small run on one device: planner, trainer and engine as agents without Slurm, which share the device.

`tests/gpu/test_gpu_run.py` checks the same run.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from bench.gpu_check_steps import Figures, Setting
from bench.harness import KEYCHAIN, changes
from libra_hpc.errors import OperationError
from libra_hpc.facts.rundir import RunDir, read_lines
from libra_hpc.mesh.mpi_library import ABI, LIBRARY
from libra_hpc.slurm import local
from tests.example_files import KEYCHAIN_TASK

COMMAND = [sys.executable, "-c", "from libra_hpc_cli.app import main; main()"]
OVERRIDES = {
    "run.name": "gpu",
    "slurm.executor": "local",
    "components.train.gpus": 1,
    "components.rollout.gpus": 1,
    "model.dtype": "bfloat16",
    "optimizer.lr": 3e-4,
    "checkpoint.every": 5,
}
COLUMNS = {"step, s": "step_s", "  training, s": "train_wall_s", "  new weights written, s": "diff_s"}
"""Figures of a step, and where `metrics.jsonl` has them."""
WARM_START = 200
"""Supervised steps of the policy: it produces trajectories of several turns, and does not yet solve the task."""
LARGEST_GAP = 0.1
"""Of the log-probabilities of trainer and engine, mean over a batch.

Rounding, and the one update by which an asynchronous sample may be behind, are below it; other weights are above 1.
"""
QUOTED = 1500
"""Characters of a failed run's logs in the error."""
STOP_S = 30.0
"""Of the time limit: for a run that is late to end."""


class RunRecords(msgspec.Struct, frozen=True):
    seconds: float
    metrics: list[dict[str, Any]]
    events: list[dict[str, Any]]

    def applied(self) -> dict[int, float]:
        """When the engine had each version, epoch seconds."""
        return {e["version"]: e["t"] for e in self.events if e["kind"] == "weights_applied"}

    def problem(self, steps: int) -> str:
        """Why the run is not right; empty when it is."""
        if [line["step"] for line in self.metrics] != list(range(1, steps + 1)):
            return f"The run committed {len(self.metrics)} steps of {steps}."
        gap = max(line.get("logprob_gap", 0.0) for line in self.metrics)
        if not gap < LARGEST_GAP:
            return f"Log-probabilities of trainer and engine differ by {gap:.3g}."
        if max(self.applied(), default=-1) < steps - 1:
            return f"The engine has the weights of version {max(self.applied(), default=-1)} after {steps} steps."
        return ""


def run_whole(folder: Path, *, device: str, steps: int, kv_cache_mb: int, limit_s: float) -> RunRecords:
    """Make a policy and run it; raises `OperationError` when the run fails or is late, and leaves no process."""
    # The launcher of local ranks speaks the protocol of PyPI's mpich, whatever this machine's mpi4py is set to.
    environment = {name: value for name, value in os.environ.items() if name not in (ABI, LIBRARY)}
    deadline = time.monotonic() + limit_s - STOP_S
    policy = [*COMMAND, "make-policy", str(folder / "policy"), "--task", KEYCHAIN_TASK, "--executor", "local"]
    policy += ["--steps", str(WARM_START)]
    # The policy's supervised warm start is meant for the CPU.
    made = subprocess.run(policy, env={**environment, "CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True)
    if made.returncode:
        raise OperationError(f"make-policy failed: {(made.stdout + made.stderr)[-QUOTED:]}")
    own = {"run.dir": folder / "runs", "run.steps": steps, "slurm.device": device, "model.path": folder / "policy"}
    own |= {"rollout.kv_cache_mb": kv_cache_mb}
    begin = time.monotonic()
    patience_s = max(1.0, deadline - begin)
    command = [*COMMAND, "submit", str(KEYCHAIN), "--wait", *changes(OVERRIDES | own)]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=patience_s)
    except subprocess.TimeoutExpired:
        raise OperationError(f"The run did not end within {patience_s:.0f} s. {last_logs(folder)}") from None
    finally:
        for path in (folder / "runs").glob("gpu-*"):
            with contextlib.suppress(OSError, ValueError):
                local.cancel(RunDir(path))
    if done.returncode:
        raise OperationError(f"The run failed. {(done.stdout + done.stderr)[-QUOTED:]} {last_logs(folder)}")
    run = RunDir(next((folder / "runs").iterdir()))
    return RunRecords(time.monotonic() - begin, list(read_lines(run.metrics)), list(read_lines(run.events)))


def last_logs(folder: Path) -> str:
    logs = {log.name: log.read_text(errors="replace")[-QUOTED:] for log in sorted((folder / "runs").rglob("*.log"))}
    return "\n".join(f"{name}: {text}" for name, text in logs.items() if text)


def whole_run(setting: Setting, figures: Figures) -> None:
    """Measure a run; raises `OperationError` when it is not right."""
    setting.check()
    with tempfile.TemporaryDirectory(prefix="libra-gpu-") as folder:
        sizes = {"steps": setting.sizes.run_steps, "kv_cache_mb": setting.sizes.kv_cache_mb}
        records = run_whole(Path(folder), device=setting.device, limit_s=setting.limit_s, **sizes)
    metrics, applied = records.metrics, records.applied()
    figures.add("start to end, s", records.seconds)
    figures.add("steps committed", float(len(metrics)))
    # The first step has the start of both engines.
    if later := metrics[1:] or metrics:
        figures.add("largest difference of log-probabilities", max(line.get("logprob_gap", 0.0) for line in metrics))
        for what, column in COLUMNS.items():
            figures.add(what, median(line[column] for line in later))
        tokens, seconds = (sum(line[column] for line in later) for column in ("gen_tokens", "step_s"))
        figures.add("  generated tokens/s", tokens / seconds)
        waits = [applied[line["version"]] - line["t"] for line in later if line["version"] in applied]
        if waits:
            figures.add("  commit until the engine has the weights, s", median(waits))
        loads = [event["seconds"] for event in records.events if event["kind"] == "weights_applied"]
        figures.add("  of it in the engine, s", median(loads) if loads else 0.0)
    if problem := records.problem(setting.sizes.run_steps):
        raise OperationError(problem)
