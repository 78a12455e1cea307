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

from bench.gpu_check_setting import Figures, Setting
from libra_hpc.errors import OperationError
from libra_hpc.facts.rundir import RunDir, read_lines
from libra_hpc.mesh.mpi_library import ABI, LIBRARY
from libra_hpc.slurm import local

COMMAND = [sys.executable, "-c", "from libra_hpc_cli.app import main; main()"]
RUN_FILE = """
[run]
name = "gpu"
dir = "{folder}/runs"
steps = {steps}
[slurm]
device = "{device}"
executor = "local"
[components]
planner = {{ cpus = 2, mem = "4G" }}
train = {{ nodes = 1, gpus = 1, mem = "4G" }}
hybrid = {{ nodes = 0 }}
rollout = {{ nodes = 1, gpus = 1, mem = "4G" }}
[model]
path = "{folder}/policy"
dtype = "bfloat16"
[task]
name = "keychain"
[optimizer]
lr = 3e-4
[rollout]
max_model_len = 640
kv_cache_mb = {kv_cache_mb}
[checkpoint]
every = 5
"""
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
    """What a completed run recorded."""

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
        gap = max(line["logprob_gap"] for line in self.metrics)
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
    policy = [*COMMAND, "make-policy", str(folder / "policy"), "--steps", str(WARM_START), "--executor", "local"]
    # The policy's supervised warm start is meant for the CPU.
    made = subprocess.run(policy, env={**environment, "CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True)
    if made.returncode:
        raise OperationError(f"make-policy failed: {(made.stdout + made.stderr)[-QUOTED:]}")
    run_file = folder / "run.toml"
    run_file.write_text(RUN_FILE.format(folder=folder, steps=steps, device=device, kv_cache_mb=kv_cache_mb))
    begin = time.monotonic()
    patience_s = max(1.0, deadline - begin)
    command = [*COMMAND, "submit", str(run_file), "--wait"]
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
    """Ends of the run's logs."""
    logs = {log.name: log.read_text(errors="replace")[-QUOTED:] for log in sorted((folder / "runs").rglob("*.log"))}
    return "\n".join(f"{name}: {text}" for name, text in logs.items() if text)


def whole_run(setting: Setting, figures: Figures) -> None:
    """Measure a run; raises `OperationError` when it is not right."""
    setting.check()
    with tempfile.TemporaryDirectory(prefix="libra-gpu-") as folder:
        records = run_whole(
            Path(folder),
            device=setting.device,
            steps=setting.run_steps,
            kv_cache_mb=setting.kv_cache_mb,
            limit_s=setting.limit_s,
        )
    problem = records.problem(setting.run_steps)
    metrics, applied = records.metrics, records.applied()
    figures.add("start to end, s", records.seconds)
    figures.add("steps committed", float(len(metrics)))
    if metrics:
        figures.add("largest difference of log-probabilities", max(line["logprob_gap"] for line in metrics))
        # The first step has the start of both engines.
        later = metrics[1:] or metrics
        for what, column in (
            ("step, s", "step_s"),
            ("  training, s", "train_wall_s"),
            ("  export of weights, s", "export_s"),
        ):
            figures.add(what, median(line[column] for line in later))
        figures.add(
            "  generated tokens/s", sum(line["gen_tokens"] for line in later) / sum(line["step_s"] for line in later)
        )
        waits = [applied[line["version"]] - line["t"] for line in later if line["version"] in applied]
        if waits:
            figures.add("  commit until the engine has the weights, s", median(waits))
        loads = [e["seconds"] for e in records.events if e["kind"] == "weights_applied"]
        figures.add("  of it in the engine, s", median(loads) if loads else 0.0)
    if problem:
        raise OperationError(problem)
