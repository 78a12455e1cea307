"""Whole runs on real parts: Slurm or local ranks, MPI agents, Megatron, vLLM, environment host.  Kills, cancel, resume, and a node that moves."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from libra_hpc.slurm.devcluster.cluster import ClusterInfo
from libra_hpc.telemetry.rundir import RunDir, read_lines

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.engine,
    pytest.mark.timeout(600),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None or importlib.util.find_spec("megatron") is None, reason="the engines are not installed"),
]

BATCH = 4
RUN_FILE = """
[run]
name = "t"
dir = "{runs}"
steps = {steps}
[components]
planner = {{ partition = "cpu", mem = "2G" }}
train = {{ partition = "a800", gpus = 1, mem = "4G" }}
hybrid = {{ partition = "a800", nodes = {hybrid}, gpus = 1, mem = "4G" }}
rollout = {{ partition = "a800", gpus = 1, mem = "4G" }}
[model]
path = "{model}"
dtype = "float32"
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


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A barely warm-started policy: it calls tools and fails often, which is all these tests need."""
    folder = tmp_path_factory.mktemp("policy") / "tiny"
    code = f"from libra_hpc.tasks.policy import make_tiny_policy as m; m({str(folder)!r}, steps=120)"
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return folder


class Case:
    """One run, driven through the command line."""

    def __init__(self, folder: Path, policy: Path, executor: str, **values: Any) -> None:
        self.folder, self.executor = folder, executor
        self.run_file = folder / "run.toml"
        self.run_file.write_text(RUN_FILE.format(runs=folder / "runs", model=policy, **{"steps": 30, "hybrid": 1, "notes": 0, **values}))
        self.run: RunDir | None = None

    def cli(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        command = [str(Path(sys.executable).with_name("libra-hpc")), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, cwd=self.folder, timeout=400)
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done

    def submit(self) -> RunDir:
        self.cli("submit", str(self.run_file), "--executor", self.executor)
        self.run = RunDir(self.folder / "runs" / "t-001")
        return self.run

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
        return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')[-1500:]}" for path in sorted(self.run.path.glob("logs/*/*.log")))

    def kill(self, rank: int, module: str) -> None:
        """Freeze, then SIGKILL the child of a rank's agent that runs ``module``, so that it certainly dies with work in hand."""
        agent = next(event["pid"] for event in reversed(self.events("agent_joined")) if event["rank"] == rank)
        children = Path(f"/proc/{agent}/task/{agent}/children").read_text().split()
        victims = [int(pid) for pid in children if module in Path(f"/proc/{pid}/cmdline").read_text()]
        assert len(victims) == 1, (rank, module, children)
        os.kill(victims[0], signal.SIGSTOP)
        time.sleep(1.0)
        os.kill(victims[0], signal.SIGKILL)


def trained_once(run: RunDir, steps: int) -> None:
    """Every step once, and the checkpoint's data position says that exactly the first ``steps`` batches' prompts are trained."""
    assert [int(line["step"]) for line in read_lines(run.metrics)] == list(range(1, steps + 1))
    newest = run.latest_checkpoint()
    assert newest is not None
    assert newest[0] == steps
    state = run.read_json(newest[1] / "state.json")
    assert state["low"] + len(state["extra"]) == steps * BATCH


def test_killed_engines_cancel_and_resume_on_slurm(cluster: ClusterInfo, policy: Path, tmp_path: Path) -> None:
    case = Case(tmp_path, policy, "slurm", steps=40, hybrid=0)
    run = case.submit()
    case.wait(lambda: len(case.steps()) >= 4, "first steps")
    case.kill(2, "libra_hpc.rollout.engine")
    case.wait(lambda: case.events("engine_lost"), "the lost engine")
    before = len(case.steps())
    case.wait(lambda: len(case.steps()) >= before + 6, "steps with a rebuilt vLLM engine")
    assert case.events("resubmitted"), "turns in flight at the lost engine are sent again"
    case.kill(1, "libra_hpc.train.worker")
    case.wait(lambda: len(case.events("engine_lost")) == 2, "the lost worker")
    before = len(case.steps())
    case.wait(lambda: len(case.steps()) >= before + 2, "steps with a rebuilt Megatron worker")

    shown = json.loads(case.cli("status", str(run.path), "--json").stdout)
    shown = shown["status"]
    assert shown["state"] == "running"
    assert {node["component"] for node in shown["nodes"]} == {"planner", "train", "rollout"}

    case.cli("cancel", str(run.path))
    assert case.ended() == "cancelled"
    reached = run.latest_checkpoint()
    assert reached is not None
    assert reached[0] == case.steps()[-1], "cancelling saves at a step border"
    for _ in range(60):
        done = case.cli("submit", "--resume", str(run.path), "--wait", check=False)
        if "is running" not in done.stderr:
            break
        time.sleep(0.5)
    assert done.returncode == 0, done.stdout + done.stderr
    assert case.ended() == "completed"
    trained_once(run, 40)
    assert max(line["staleness_max"] for line in read_lines(run.metrics)) <= 1

    from transformers import AutoModelForCausalLM

    assert AutoModelForCausalLM.from_pretrained(run.policy).config.num_hidden_layers == 2
    command = [sys.executable, "-m", "libra_hpc.rollout.evaluate", "--policy", str(run.policy), "--config", str(run.config), "--episodes", "24"]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
    assert found["episodes"] == 24, "vLLM serves the exported policy"
    assert -0.2 <= found["reward"] <= 1.0
    summary = json.loads(case.cli("summary", str(run.path), "--json").stdout)
    assert summary["steps"] == 40
    assert run.summary_picture.stat().st_size > 10_000


def test_the_planner_moves_a_node_and_its_new_replica_may_die(policy: Path, tmp_path: Path) -> None:
    case = Case(tmp_path, policy, "local", steps=400, notes=96)
    run = case.submit()
    case.wait(lambda: case.events("move_done"), "a move on the planner's own decision")
    started, done = case.events("move_started")[0], case.events("move_done")[0]
    assert (started["rank"], started["to"], done["role"]) == (2, "train", "train")
    assert "batch from" in started["reason"]
    meanwhile = [line for line in read_lines(run.metrics) if started["t"] < line["t"] < done["t"]]
    assert meanwhile, "the core goes on stepping while the node moves"
    newcomer = [e for e in case.events("member_joined") if e["rank"] == 2]
    assert newcomer[0]["received_bytes"] > 3 * 4 * 100_000, "weights and both moments come from the live peer"
    case.wait(lambda: any(line["replicas"] == 2 for line in read_lines(run.metrics)), "a step of two replicas")

    case.kill(2, "libra_hpc.train.worker")
    case.wait(lambda: any(e["engine"].startswith("t2") for e in case.events("engine_lost")), "the lost replica")
    case.wait(lambda: len([e for e in case.events("member_joined") if e["rank"] == 2]) >= 2, "the replica is back")
    before = len(case.steps())
    case.wait(lambda: len(case.steps()) >= before + 2, "steps after it")
    case.cli("cancel", str(run.path))
    assert case.ended() == "cancelled"
    trained_once(run, case.steps()[-1])
