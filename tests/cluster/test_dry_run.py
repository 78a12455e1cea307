"""A dry run on the embedded Slurm: the whole control plane around simulated engines, with a lost engine, a lost
trainer, and a node that moves."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import groupby
from pathlib import Path

import pytest
from msgspec.structs import asdict

from libra_hpc.annexes.devcluster.cluster import ClusterInfo
from libra_hpc.facts.layout_log import replay
from libra_hpc.facts.rundir import read_lines
from libra_hpc.models.devices import device
from libra_hpc.planning.request import InTurn
from libra_hpc.rollout.recovery.recovery_log import read_segment
from tests.docs.blocks import ROOT

from .runs import Case, trained_once

pytestmark = pytest.mark.timeout(600)

RUN_FILE = """
[run]
name = "t"
dir = "{runs}"
steps = {steps}
[components]
planner = {{ partition = "cpu", mem = "2G" }}
train = {{ partition = "a800", gpus = 8, gpu_type = "a800", mem = "4G" }}
hybrid = {{ partition = "a800", gpus = 8, gpu_type = "a800", mem = "4G" }}
rollout = {{ partition = "a800", gpus = 8, gpu_type = "a800", mem = "4G" }}
[algorithm]
prompts_per_step = 4
group_size = 8
skip_zero_advantage = false
[train]
tp = 4
[rollout]
tp = [4, 8]
engines_per_node = [2, 1]
max_model_len = 4096
[planner]
model = "qwen3-8b"
devices = "{devices}"
interval_s = 20.0
min_dwell_s = 20.0
switch_cost_s = 20.0
horizon_s = 40000.0
margin = 1.0
moves_per_hour = 60
[checkpoint]
every = 0
[simulated]
presets = ["math"]
speedup = 40.0
start_s = 20.0
"""
"""Half of the eight GPUs of the training node in use, which are slow there: training is the slower stage, so the hybrid
node is needed."""


TRAINING = ("product_efficiency", "attention_forward_efficiency", "attention_backward_efficiency", "stream_efficiency")


class DryRun(Case):
    """A run without a policy folder, on devices that reach a tenth of the peak in training."""

    def __init__(self, folder: Path, executor: str, steps: int) -> None:
        super().__init__(folder, Path(), executor)
        slow = asdict(device("a800")) | dict.fromkeys(TRAINING, 0.1)
        devices = folder / "slow.toml"
        fields = (f"{key} = {json.dumps(value)}\n" for key, value in slow.items() if key != "name")
        devices.write_text(f"[a800]\n{''.join(fields)}")
        self.run_file.write_text(RUN_FILE.format(runs=folder / "runs", steps=steps, devices=devices))


def test_a_dry_run_loses_processes_moves_a_node_and_resumes(cluster: ClusterInfo, tmp_path: Path) -> None:
    case = DryRun(tmp_path, "slurm", steps=400)
    run = case.submit("--engine", "simulated")
    case.wait(lambda: len(case.steps()) >= 3, "first steps")
    assert case.events("mpi_world")[0]["nodes"] == 4
    case.wait(lambda: dict.fromkeys((1, 2, 3), "mpi") in [one.ways for one in replay(run)], "Layouts by MPI to all")
    case.kill(3, "libra_hpc.simulated.engine_process")
    case.wait(lambda: case.events("engine_lost"), "the lost engine")
    case.kill(1, "t1.0.json")
    case.wait(lambda: len(case.events("engine_lost")) == 2, "the lost trainer")
    before = len(case.steps())
    case.wait(lambda: len(case.steps()) >= before + 2, "steps with a rebuilt trainer")

    case.wait(lambda: case.events("move_done"), "a move on the planner's own decision")
    started = case.events("move_started")[0]
    assert (started["rank"], started["to"]) == (2, "train")
    joined = [event for event in case.events("member_joined") if event["rank"] == 2]
    received = joined[0]["received_bytes"]
    assert received == 0 or received > 1e9, "the newcomer has the weights for rollout, or gets its share, as modelled"
    case.wait(lambda: any(line["replicas"] == 2 for line in read_lines(run.metrics)), "a step of two replicas")
    states = [key for key, _ in groupby(one.layout.rows[2].state for one in replay(run) if one.layout.rows)]
    assert states[:4] == ["starting", "rollout", "to_train", "train"], "the log of Layouts replays the move"
    assert {line["level"] for line in read_lines(run.decisions) if "level" in line} == {0, 1}, "turns at both degrees"

    shown = json.loads(case.cli("status", str(run.path), "--json").stdout)["status"]
    assert {node["component"] for node in shown["nodes"]} == {"planner", "train", "hybrid", "rollout"}
    done = case.cli("cancel", str(run.path))
    assert case.ended() == "cancelled"
    reached = case.steps()[-1]
    assert f"step {reached} is saved" in done.stdout, "the run is asked first, and answers"
    trained_once(run, reached)

    written = lambda: len([line for line in read_lines(run.trajectories) if "index" in line])  # noqa: E731
    case.wait(lambda: written() >= reached * 32, "all trajectories, written by the rollout leader as the run ended")
    done = case.cli("trace", "inspect", str(run.trajectories), "--json")
    assert json.loads(done.stdout)["description"]["trajectories"] >= reached * 32

    recorded = any(read_segment(path)[0] for path in run.experience.glob("*.frames"))
    case.resume("-o", f"run.steps={reached + 2}")
    assert case.ended() == "completed"
    trained_once(run, reached + 2)
    kept = [(event["trajectories"], list(event["dropped"])) for event in case.events("experience_kept")]
    assert kept == ([(0, ["configuration"])] if recorded else []), "of so many prompts each is another one"


@pytest.mark.parametrize("eta", [0, 1])
def test_all_nodes_of_a_run_roll_out_and_train_in_turn(cluster: ClusterInfo, tmp_path: Path, eta: int) -> None:
    case = DryRun(tmp_path, "slurm", steps=8)
    nodes = {"components.train.nodes": 2, "components.hybrid.nodes": 0, "components.rollout.nodes": 0}
    keys = nodes | {"algorithm.eta": eta, "rollout.tp": 4, "rollout.engines_per_node": 2} | InTurn(0.0).keys
    run = case.submit(
        "--engine", "simulated", *(word for key, value in keys.items() for word in ("-o", f"{key}={json.dumps(value)}"))
    )
    case.wait(lambda: len(case.steps()) >= 3, "first steps")
    case.kill(2, "r2.0.json")
    case.wait(lambda: case.events("engine_lost"), "the lost engine, after which nothing rolls out")
    assert (case.ended(), case.events("illegal_transition"), case.events("recovered")) == ("completed", [], [])
    trained_once(run, 8)
    found = [(line["train_nodes"], line["rollout_nodes"], line["staleness_max"]) for line in read_lines(run.metrics)]
    assert ({one[:2] for one in found}, max(found)) == ({(2, 2)}, (2, 2, eta))


def test_the_notebook_of_the_examples_follows_a_run_to_its_end(tmp_path: Path) -> None:
    case = DryRun(tmp_path, "local", steps=3)
    text = case.run_file.read_text().replace("[run]", '[run]\nengine = "simulated"')
    case.run_file.write_text(text.replace("40.0\nstart_s", "400.0\nstart_s") + '[slurm]\nexecutor = "local"\n')
    command = [sys.executable, str(ROOT / "examples/notebook.py"), str(case.run_file)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split(":")[0] for line in lines[:3]] == ["step 1", "step 2", "step 3"]
    assert "notebook-001 is completed; the best prompt was " in lines[3]
    assert lines[4] == "{'notebook-001': 'completed'}"
