"""``components.split = "auto"`` on the command line: a table before queueing, `plan.json` beside the run, and
mistakes in one sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from libra_hpc.config.load import read_toml
from libra_hpc.facts.rundir import RunDir
from libra_hpc.models.shapes import model_shape
from libra_hpc.slurm.queue.query import JobInfo, JobState
from tests.example_files import KEYCHAIN_TASK
from tests.preflight.test_checks import write_model
from tests.slurm.test_examples import model_folder

from .conftest import Cli, Queue
from .mistake_rows import overrides

RUN = f"""
[run]
name = "quick"
[slurm]
device = "cuda"
[components]
split = "auto"
planner = {{ partition = "cpu" }}
train = {{ partition = "a800", gpus = 8, gpu_type = "a800", cpus = 16, mem = "512G" }}
hybrid = {{ partition = "a800", gpus = 8, gpu_type = "a800", cpus = 16, mem = "512G" }}
rollout = {{ partition = "a800", gpus = 8, gpu_type = "a800", cpus = 16, mem = "512G", nodes = 2 }}
[model]
path = "model"
[task]
name = "{KEYCHAIN_TASK}"
[algorithm]
prompts_per_step = 64
[rollout]
max_model_len = 32768
max_num_seqs = 96
"""


@pytest.fixture
def auto(site: Path, few_batches: None) -> Path:
    """The site with a real shape and a run file that leaves the split open."""
    shape = json.loads((model_folder(site / "shape", model_shape("qwen3-4b")) / "config.json").read_text())
    write_model(site / "model", {**shape, "tie_word_embeddings": True})
    (site / "run.toml").write_text(RUN)
    return site


def test_submit_shows_the_plan_queues_it_and_keeps_why(auto: Path, queue: Queue, cli: Cli) -> None:
    outcome = cli("submit", "run.toml")
    assert (outcome.code, outcome.err) == (0, "")
    shown = [outcome.out.index(text) for text in ("split = auto", "chosen: train.nodes = ", "Submitted 4711")]
    assert shown == sorted(shown)
    assert max(map(len, outcome.out.splitlines()[:-1])) <= 100
    run = RunDir(auto / "runs" / "quick-001")
    config, plan = run.read_json(run.config), run.read_json(run.plan)
    parts = config["components"]
    assert sum(parts[name]["nodes"] for name in ("train", "hybrid", "rollout")) == 4
    assert parts["split"] == "explicit"
    assert plan["chosen"]["components.train.nodes"] == parts["train"]["nodes"]
    assert plan["chosen"]["train.tp"] == config["train"]["tp"]
    assert {"best", "excluded", "inputs", "plan", "predicted", "sources", "train_factor"} <= set(plan)
    assert read_toml(run.toml)["components"]["split"] == "auto", "the run file stays as written"


def test_dry_run_prints_the_script_of_the_chosen_split_and_writes_nothing(auto: Path, queue: Queue, cli: Cli) -> None:
    outcome = cli("submit", "run.toml", "--dry-run", "--until-done", "--", "--exclusive")
    assert outcome.code == 0
    assert outcome.out.startswith("#!")
    assert "split = auto" in outcome.err
    chosen = {
        name: int(outcome.err.split(f"{name}.nodes = ")[1].split(",")[0]) for name in ("train", "hybrid", "rollout")
    }
    for name, nodes in chosen.items():
        assert (f"# {name}: {nodes} node" in outcome.out) == (nodes > 0)
    assert not (auto / "runs").exists()
    assert queue.submitted == []


@pytest.mark.slow
def test_check_prints_what_submit_would_choose(auto: Path, cli: Cli) -> None:
    chosen = cli("submit", "run.toml", "--dry-run").err.split("chosen: ")[1]
    outcome = cli("check", "run.toml")
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.split("chosen: ")[1].startswith(chosen.strip())


def test_a_resumed_run_keeps_its_split(auto: Path, queue: Queue, cli: Cli) -> None:
    cli("submit", "run.toml")
    run = RunDir(auto / "runs" / "quick-001")
    before = run.read_json(run.config)["components"]
    queue.answer = JobInfo("4711", JobState.FAILED)
    assert cli("submit", "--resume", "quick-001").code == 0
    assert run.read_json(run.config)["components"] == before


def test_a_dry_run_is_planned_for_the_hardware_it_simulates(auto: Path, queue: Queue, cli: Cli) -> None:
    changed = overrides("slurm.device=cpu; planner.model=qwen3-14b; rollout.max_model_len=16384")
    outcome = cli("submit", "run.toml", "--engine", "simulated", *changed)
    assert (outcome.code, outcome.err) == (0, "")
    assert "qwen3-14b on 32 x a800" in outcome.out
