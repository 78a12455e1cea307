"""Every user mistake: exit code 2, one sentence on stderr that names field and value, nothing queued, nothing
written."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from libra_hpc.files import write_atomic
from libra_hpc.slurm.query import JobInfo, JobState
from libra_hpc.telemetry.rundir import RunDir
from libra_hpc.telemetry.status import encode_status
from tests.telemetry import synthetic

from .conftest import Outcome, Queue

GPU_NODES = ["-o", "slurm.device=cuda"] + [
    word
    for name in ("train", "hybrid", "rollout")
    for key in ("gpus=8", "gpu_type=a800", "cpus=8", "mem=64G")
    for word in ("-o", f"components.{name}.{key}")
]
CASES = {
    "unknown key": (["-o", "algorithm.etta=1"], "algorithm.etta = 1: unknown key in [algorithm]"),
    "unknown section": (["-o", "algoritm.eta=1"], "[algoritm]: unknown section"),
    "malformed override": (["-o", "eta=1"], "override = 'eta=1': malformed"),
    "negative eta": (["-o", "algorithm.eta=-1"], "algorithm.eta = -1: out of range; valid: an integer >= 0."),
    "group of one": (
        ["-o", "algorithm.group_size=1"],
        "algorithm.group_size = 1: out of range; valid: an integer >= 2.",
    ),
    "text for a number": (["-o", "optimizer.lr=fast"], "optimizer.lr = 'fast': wrong type; valid: a number > 0."),
    "unknown device": (["-o", "slurm.device=gpu"], "slurm.device = 'gpu': unknown value; valid: cpu, cuda"),
    "unknown executor": (
        ["--executor", "slrum"],
        "slurm.executor = 'slrum': unknown value; valid: auto, slurm, local (did you mean 'slurm'?).",
    ),
    "bad run name": (["-o", "run.name=a/b"], "run.name = 'a/b': malformed"),
    "bad memory": (["-o", "components.train.mem=2GB"], "components.train.mem = '2GB': malformed"),
    "too many minibatches": (
        ["-o", "algorithm.minibatches=65"],
        "algorithm.minibatches = 65: a global batch has 64 trajectories; valid: 1 to 64.",
    ),
    "two planners": (["-o", "components.planner.nodes=2"], "components.planner.nodes = 2: rank 0 is the one planner"),
    "no training node": (["-o", "components.train.nodes=0"], "components.train.nodes = 0"),
    "no rollout node": (["-o", "components.rollout.nodes=0"], "components.rollout.nodes = 0"),
    "unknown policy": (["-o", "rollout.policy=cmlqf"], "rollout.policy = 'cmlqf': unknown policy; valid: "),
    "unknown task": (["-o", "task.name=keychian"], "task.name = 'keychian': unknown task"),
    "missing task file": (["-o", "task.name=absent.py:Task"], "absent.py cannot be read (No such file or directory)"),
    "missing model": (["-o", "model.path=nowhere"], "nowhere': no such folder"),
    "no model": (["-o", "model.path="], "model.path = '': not given"),
    "incomplete model": (["-o", "model.path=."], "the folder has no config.json"),
    "train tp": (
        ["-o", "train.tp=3"],
        "train.tp = 3: does not divide the model's num_attention_heads = 8; valid: 1, 2, 4, 8.",
    ),
    "train pp": (
        ["-o", "train.pp=4"],
        "train.pp = 4: does not divide the model's num_hidden_layers = 6; valid: 1, 2, 3, 6.",
    ),
    "rollout tp": (["-o", "rollout.tp=5"], "rollout.tp = 5: does not divide the model's num_attention_heads = 8"),
    "context too long": (
        ["-o", "rollout.max_model_len=9000"],
        "rollout.max_model_len = 9000: the model's max_position_embeddings is 8192",
    ),
    "engines without GPUs": (
        ["-o", "slurm.device=cuda"],
        "train.tp * train.pp needs 1 GPUs and components.train has 0 per node",
    ),
    "a CPU for eight engines": (
        [*GPU_NODES, "-o", "components.train.cpus=7"],
        "components.train.cpus = 7: a node with 8 GPUs",
    ),
    "too little memory": ([*GPU_NODES, "-o", "components.hybrid.mem=2G"], "components.hybrid.mem = '2G': the weights"),
    "malformed time": (["-o", "slurm.time_limit=1h"], "slurm.time_limit = '1h': malformed"),
    "time above the partition's": (["-o", "slurm.time_limit=2-00:00:00"], "slurm.time_limit = '2-00:00:00': "),
    "unknown partition": (
        ["-o", "components.train.partition=a80"],
        "components.train.partition = 'a80': no such partition",
    ),
    "too many nodes": (["-o", "components.hybrid.nodes=5"], "components.hybrid.nodes = 5: partition a800 has 4 nodes"),
    "too many GPUs": (["-o", "components.train.gpus=9"], "components.train.gpus = 9: "),
    "wrong GPU": (
        ["-o", "components.train.gpus=1", "-o", "components.train.gpu_type=h100"],
        "components.train.gpu_type = 'h100': ",
    ),
    "too many CPUs": (["-o", "components.train.cpus=65"], "components.train.cpus = 65: "),
    "too much memory": (["-o", "components.rollout.mem=2T"], "components.rollout.mem = '2T': "),
    "run folder below a file": (["-o", "run.dir=run.toml/runs"], "run.toml is not a folder"),
    "unknown MPI plugin": (["-o", "slurm.mpi=openmpi"], "slurm.mpi = 'openmpi': no Slurm has such an MPI plugin"),
    "nearly an MPI plugin": (["-o", "slurm.mpi=pmi_2"], "(did you mean 'pmi2'?)"),
    "unknown interpreter": (["-o", "compute.python=pyhton3"], "compute.python = 'pyhton3': no such program on PATH"),
    "an interpreter without engines": (
        ["-o", "compute.python=./login"],
        "it lacks libra_hpc, mpi4py, vllm, megatron and torch",
    ),
    "the same on a dry run": (
        ["--dry-run", "-o", "compute.python=./login"],
        "it lacks libra_hpc, mpi4py, vllm, megatron and torch",
    ),
    "no such option": (["--wiat"], "--wiat"),
}


def one_line(outcome: Outcome) -> str:
    assert outcome.out == ""
    (line,) = outcome.err.splitlines()
    assert line.startswith("error: ")
    return line


@pytest.mark.parametrize("case", CASES)
def test_a_mistake_in_the_run_file(case: str, site: Path, queue: Queue, cli: Callable[..., Outcome]) -> None:
    arguments, sentence = CASES[case]
    (site / "login").write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "$@"\n')
    (site / "login").chmod(0o755)
    before = sorted(site.rglob("*"))
    outcome = cli("submit", "run.toml", *arguments)
    assert outcome.code == 2
    assert sentence in one_line(outcome)
    assert queue.submitted == []
    assert sorted(site.rglob("*")) == before


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["submit"], "either a run file or --resume"),
        (["submit", "run.toml", "--resume", "quick-001"], "either a run file or --resume"),
        (["submit", "absent.toml"], "absent.toml: the run file cannot be read"),
        (["status"], "There is no run below runs/"),
        (["status", "quick-007"], "RUN = 'quick-007': no run of that name"),
        (["submti"], "submti"),
        (
            ["simulate", "trace", "--calibration", "absent"],
            "calibration file = 'absent': No such file or directory; valid: ",
        ),
        (["plan", "run.toml", "--best", "0"], "--best"),
        (["submit", "run.toml", "-o", f"run.name={'x' * 5000}"], f"run.name = '{'x' * 119}...: too long; valid: "),
        (["repartition", "quick-001"], "KEY=VALUE"),
        (["repartition", "train.tp=2", "rollout.tp=2"], "RUN = 'train.tp=2': no run of that name"),
        (["make-policy", "model"], "OUT = 'model': exists already"),
        (["make-policy", "new", "--task", "chess"], "--task = 'chess': unknown task; valid: arithmetic, keychain"),
    ],
)
def test_a_mistake_in_the_command_line(
    arguments: list[str], sentence: str, site: Path, queue: Queue, cli: Callable[..., Outcome]
) -> None:
    outcome = cli(*arguments)
    assert outcome.code == 2
    assert sentence in one_line(outcome)
    assert queue.submitted == []


LAYOUTS = {
    "not part of a layout": (
        "running",
        ["algorithm.eta=2"],
        "KEY = 'algorithm.eta': not part of a layout; valid: components.train.nodes, ",
    ),
    "nearly a key": ("running", ["rolout.tp=2"], "(did you mean 'rollout.tp'?)."),
    "no value": (
        "running",
        ["train.tp"],
        "override = 'train.tp': malformed; valid: section.key=value, for instance train.tp=2.",
    ),
    "wrong type": ("running", ["train.recompute=yes"], "train.recompute = 'yes': wrong type; valid: true or false."),
    "more nodes than the job": ("running", ["components.train.nodes=2"], "components.*.nodes = '2 + 1 + 1': "),
    "heads": ("running", ["train.tp=3"], "train.tp = 3: does not divide the model's num_attention_heads = 8"),
    "the present one": (
        "running",
        ["rollout.tp=[1,1]"],
        "rollout.tp = [1, 1]: the run has this layout already (1 node trains with TP1, ",
    ),
    "ended": (
        "completed",
        ["train.tp=2"],
        "RUN = 'quick-001': it is over (job 4711 is completed); valid: a run whose job is running",
    ),
    "starting": ("starting", ["train.tp=2"], "RUN = 'quick-001': it does not run (job 4711 is starting)"),
    "starting again": ("restarting", ["train.tp=2"], "RUN = 'quick-001': it does not run (job 4711 is starting)"),
    "killed": ("job failed", ["train.tp=2"], "RUN = 'quick-001': it is over (job 4711 is failed ("),
    "queued": ("job pending", ["train.tp=2"], "RUN = 'quick-001': it does not run (job 4711 is pending)"),
    "ordered": ("ordered", ["train.tp=2"], "RUN = 'quick-001': another layout is ordered already"),
}


@pytest.mark.parametrize("case", LAYOUTS)
def test_a_mistake_in_an_order_for_another_layout(
    case: str, site: Path, queue: Queue, cli: Callable[..., Outcome]
) -> None:
    state, arguments, sentence = LAYOUTS[case]
    cli("submit", "run.toml")
    run = RunDir(site / "runs" / "quick-001")
    queue.answer = JobInfo("4711", JobState.RUNNING)
    if state.startswith("job "):
        queue.answer = JobInfo("4711", JobState[state.removeprefix("job ").upper()])
    if state != "job pending":
        known = state if state in ("completed", "starting", "restarting") else "running"
        status = msgspec.structs.replace(synthetic.make_status(run, state=known), updated_at=time.time())
        write_atomic(run.status, encode_status(status))
        if known == "completed":
            run.write_json(run.result, {"state": known, "t": time.time()})
    if state == "ordered":
        run.order.write_text("{}")
    before = sorted(site.rglob("*"))
    outcome = cli("repartition", "quick-001", *arguments)
    assert outcome.code == 2
    assert sentence in one_line(outcome)
    assert sorted(site.rglob("*")) == before


def test_check_finds_the_same_mistakes_and_prints_one_line(site: Path, cli: Callable[..., Outcome]) -> None:
    assert cli("check", "run.toml") == Outcome(0, "run.toml is good\n", "")
    facts = json.loads(cli("check", "run.toml", "--json").out)
    expected = {"checked_against_slurm": True, "warnings": [], "expected_start": None, "split": None}
    assert facts == {"run_file": "run.toml", "good": True, **expected}
    outcome = cli("check", "run.toml", "-o", "components.train.partition=a80")
    assert outcome.code == 2
    assert "no such partition" in one_line(outcome)


def test_a_toml_mistake_names_file_and_line(site: Path, cli: Callable[..., Outcome]) -> None:
    (site / "bad.toml").write_text("[run]\nname = quick\n")
    assert "bad.toml:2: not valid TOML" in one_line(cli("submit", "bad.toml"))
