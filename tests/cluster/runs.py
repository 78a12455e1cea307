"""Whole runs for tests: a small run file, the command line that drives it, and what must hold of its records."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from libra_hpc.facts.rundir import RunDir, read_lines
from libra_hpc.protocol.trace import recorded
from tests.example_files import KEYCHAIN_TASK

BATCH = 4
ENGINE_MARKS = [
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None or importlib.util.find_spec("megatron") is None,
        reason="the engines are not installed",
    ),
]
"""Of tests whose runs have real engines."""
RUN_FILE = """
[run]
name = "t"
dir = "{runs}"
steps = {steps}
[components]
planner = {{ partition = "cpu", mem = "2G" }}
train = {{ partition = "a800", gpus = 1, mem = "4G" }}
hybrid = {{ partition = "a800", nodes = {hybrid}, gpus = 1, mem = "4G" }}
rollout = {{ partition = "a800", nodes = {rollout}, gpus = 1, mem = "4G" }}
[model]
path = "{model}"
dtype = "float32"
[task]
name = "{task}"
[task.options]
p_more = 0.5
notes = {notes}
[algorithm]
prompts_per_step = 4
group_size = 4
eta = 1
skip_zero_advantage = false
[optimizer]
lr = 3e-4
[rollout]
tp = {tp}
max_model_len = 832
kv_cache_mb = 64
[planner]
interval_s = 0.5
min_dwell_s = 1.0
margin = 1.0
switch_cost_s = 1.0
horizon_s = 600.0
[checkpoint]
every = 10
"""


class Case:
    """One run, driven through the command line."""

    def __init__(self, folder: Path, policy: Path, executor: str, **values: Any) -> None:
        self.folder, self.executor = folder, executor
        self.run_file = folder / "run.toml"
        self.run_file.write_text(
            RUN_FILE.format(
                runs=folder / "runs",
                model=policy,
                **{"steps": 30, "hybrid": 1, "rollout": 1, "tp": 1, "notes": 0, "task": KEYCHAIN_TASK, **values},
            )
        )
        self.run: RunDir | None = None

    def cli(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        command = [str(Path(sys.executable).with_name("libra-hpc")), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, cwd=self.folder, timeout=400)
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done

    def submit(self, *arguments: str) -> RunDir:
        self.cli("submit", str(self.run_file), "--executor", self.executor, *arguments)
        self.run = RunDir(self.folder / "runs" / "t-001")
        return self.run

    def resume(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Go on with the run and wait for its end; a run that has left its verdict may take seconds to leave the
        queue."""
        assert self.run is not None
        for _ in range(60):
            done = self.cli("submit", "--resume", str(self.run.path), "--wait", *arguments, check=False)
            if "is running" not in done.stderr:
                break
            time.sleep(0.5)
        assert done.returncode == 0, done.stdout + done.stderr
        return done

    def events(self, kind: str) -> list[dict[str, Any]]:
        assert self.run is not None
        return [event for event in read_lines(self.run.events) if event["kind"] == kind]

    def steps(self) -> list[int]:
        assert self.run is not None
        return [int(line["step"]) for line in read_lines(self.run.metrics)]

    def wait(self, condition: Callable[[], object], what: str) -> None:
        assert self.run is not None
        deadline = time.monotonic() + 300
        while not condition():
            result = self.run.read_json(self.run.result)
            ended = result and result["state"] != "completed" and "ended" not in what
            assert not ended, f"{what}: the run ended as {result}; {self.logs()}"
            assert time.monotonic() < deadline, f"{what}: not seen; at step {self.steps()[-1:]}; {self.logs()}"
            time.sleep(0.1)

    def ended(self) -> str:
        assert self.run is not None
        run = self.run
        self.wait(lambda: run.read_json(run.result), "ended")
        return str(run.read_json(run.result)["state"])

    def logs(self) -> str:
        assert self.run is not None
        return "\n".join(
            f"--- {path.name}\n{path.read_text(errors='replace')[-1500:]}"
            for path in sorted(self.run.path.glob("logs/*/*.log"))
        )

    def child(self, rank: int, module: str) -> int:
        """Process id of the child of a rank's agent that runs ``module``."""
        agent = next(event["pid"] for event in reversed(self.events("agent_joined")) if event["rank"] == rank)
        children = Path(f"/proc/{agent}/task/{agent}/children").read_text().split()
        found = [int(pid) for pid in children if module in Path(f"/proc/{pid}/cmdline").read_text()]
        assert len(found) == 1, (rank, module, children)
        return found[0]

    def node(self, rank: int) -> str:
        """The node of a rank; a negative one counts from the last."""
        hosts = {event["rank"]: event["host"] for event in self.events("agent_joined")}
        return str(hosts[range(len(hosts))[rank]])

    def kill(self, rank: int, module: str) -> None:
        """Freeze, then SIGKILL a child, so that it certainly dies with work in hand."""
        victim = self.child(rank, module)
        os.kill(victim, signal.SIGSTOP)
        time.sleep(1.0)
        os.kill(victim, signal.SIGKILL)


def trained_once(run: RunDir, steps: int) -> None:
    """Every step once, and the checkpoint's data position says that exactly the first ``steps`` batches' prompts are
    trained."""
    assert [int(line["step"]) for line in read_lines(run.metrics)] == list(range(1, steps + 1))
    newest = run.latest_checkpoint()
    assert newest is not None
    assert newest[0] == steps
    state = run.read_json(newest[1] / "state.json")
    assert state["low"] + len(state["extra"]) == steps * BATCH


def sampled_once(run: RunDir) -> None:
    """No trajectory that had finished was run again by a later start."""
    lines = [(one.index, one.sample) for one in recorded(run.trajectories)]
    assert len(set(lines)) == len(lines)
