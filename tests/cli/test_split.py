"""``components.split = "auto"`` on the command line: a table before queueing, `plan.json` beside the run, and
mistakes in one sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from libra_hpc.config.load import read_toml
from libra_hpc.facts.rundir import RunDir
from libra_hpc.slurm.queue.query import JobInfo, JobState

from .conftest import Outcome, Queue

Cli = Callable[..., Outcome]
SHAPE = {
    "model_type": "qwen3",
    "hidden_size": 2560,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 9728,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
}
RUN = """
[run]
name = "quick"
[slurm]
device = "cuda"
[components]
split = "auto"
planner = { partition = "cpu" }
train = { partition = "a800", gpus = 8, gpu_type = "a800", cpus = 16, mem = "512G" }
hybrid = { partition = "a800", gpus = 8, gpu_type = "a800", cpus = 16, mem = "512G" }
rollout = { partition = "a800", gpus = 8, gpu_type = "a800", cpus = 16, mem = "512G", nodes = 2 }
[model]
path = "model"
[algorithm]
prompts_per_step = 64
[rollout]
max_model_len = 32768
max_num_seqs = 256
"""


@pytest.fixture
def auto(site: Path) -> Path:
    """The site with a real shape and a run file that leaves the split open."""
    (site / "model" / "config.json").write_text(json.dumps(SHAPE))
    (site / "run.toml").write_text(RUN)
    return site


def test_submit_shows_the_plan_queues_it_and_keeps_why(auto: Path, queue: Queue, cli: Cli) -> None:
    outcome = cli("submit", "run.toml")
    assert (outcome.code, outcome.err) == (0, "")
    assert (
        outcome.out.index("split = auto")
        < outcome.out.index("chosen: train.nodes = ")
        < outcome.out.index("Submitted 4711")
    )
    assert max(map(len, outcome.out.splitlines()[:-1])) <= 100
    run = RunDir(auto / "runs" / "quick-001")
    config, plan = run.read_json(run.config), run.read_json(run.plan)
    parts = config["components"]
    assert sum(parts[name]["nodes"] for name in ("train", "hybrid", "rollout")) == 4
    assert parts["split"] == "explicit"
    assert plan["chosen"]["components.train.nodes"] == parts["train"]["nodes"]
    assert plan["chosen"]["train.tp"] == config["train"]["tp"]
    assert {"best", "excluded", "factors", "inputs", "plan", "predicted", "sources"} <= set(plan)
    assert read_toml(run.toml)["components"]["split"] == "auto", "the run file stays as written"


@pytest.mark.slow
def test_json_and_parsable_print_nothing_else(auto: Path, queue: Queue, cli: Cli) -> None:
    assert cli("submit", "run.toml", "--parsable").out == "4711\n"
    split = json.loads(cli("submit", "run.toml", "--json").out)["split"]
    replica = split["train.tp"] * split["train.pp"] * split.get("train.cp", 1)
    assert 8 * split["components.train.nodes"] % replica == 0
    explicit = ("-o", "components.split=explicit", "-o", "components.rollout.nodes=1", "-o", "train.tp=8")
    assert json.loads(cli("submit", "run.toml", *explicit, "--json").out)["split"] is None
    assert not RunDir(auto / "runs" / "quick-003").plan.exists()


def test_dry_run_prints_the_script_of_the_chosen_split_and_writes_nothing(auto: Path, queue: Queue, cli: Cli) -> None:
    outcome = cli("submit", "run.toml", "--dry-run")
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
def test_check_and_plan_print_what_submit_would_choose(auto: Path, cli: Cli) -> None:
    chosen = cli("submit", "run.toml", "--dry-run").err.split("chosen: ")[1]
    for verb in ("check", "plan"):
        outcome = cli(verb, "run.toml")
        assert (outcome.code, outcome.err) == (0, "")
        assert outcome.out.split("chosen: ")[1].startswith(chosen.strip())
    assert "chosen: " not in cli("plan", "run.toml", "-o", "components.split=explicit").out


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            ["slurm.device=cpu"],
            "components.split = 'auto': slurm.device is 'cpu' and the planner has no figures for CPU nodes",
        ),
        (["components.split=best"], "components.split = 'best': unknown value; valid: explicit, auto"),
        (["train.tp=2"], "train.tp = 2: components.split = 'auto' chooses it"),
        (["planner.device=a80"], "device = 'a80': unknown device; valid: a100, a800"),
        (["planner.model=qwen3-15b"], "model = 'qwen3-15b': neither a known short name"),
        (
            ["components.hybrid.gpu_type=h100"],
            "components.hybrid.gpu_type = 'h100': where the planner divides the nodes",
        ),
        (["planner.trace=absent.jsonl"], "absent.jsonl"),
        (["components.rollout.nodes=9"], "nodes = "),
    ],
)
def test_a_mistake_is_one_sentence_and_touches_nothing(
    overrides: list[str], sentence: str, auto: Path, queue: Queue, cli: Cli
) -> None:
    outcome = cli("submit", "run.toml", *(part for override in overrides for part in ("-o", override)))
    assert outcome.code == 2
    (line,) = outcome.err.splitlines()
    assert sentence in line
    assert (outcome.out, queue.submitted) == ("", [])
    assert not (auto / "runs").exists()


def test_a_resumed_run_keeps_its_split(auto: Path, queue: Queue, cli: Cli) -> None:
    cli("submit", "run.toml")
    run = RunDir(auto / "runs" / "quick-001")
    before = run.read_json(run.config)["components"]
    queue.answer = JobInfo("4711", JobState.FAILED)
    assert cli("submit", "--resume", "quick-001").code == 0
    assert run.read_json(run.config)["components"] == before
    outcome = cli("submit", "--resume", "quick-001", "-o", "components.split=auto")
    assert outcome.code == 2
    assert "a resumed run keeps the split it has" in outcome.err


def test_a_dry_run_is_planned_for_the_hardware_it_simulates(auto: Path, queue: Queue, cli: Cli) -> None:
    outcome = cli(
        "submit",
        "run.toml",
        "--engine",
        "simulated",
        "-o",
        "slurm.device=cpu",
        "-o",
        "simulated.model=qwen3-14b",
        "-o",
        "rollout.max_model_len=16384",
    )
    assert (outcome.code, outcome.err) == (0, "")
    assert "qwen3-14b on 32 x a800" in outcome.out
