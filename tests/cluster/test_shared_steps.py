"""Time-sharing on real engines: nodes that roll out and train each step, and the weights of a run without it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from libra_hpc.config.load import load_resolved
from libra_hpc.facts.rundir import RunDir, read_lines
from libra_hpc.protocol.codec import pack_f32, pack_i32
from libra_hpc.protocol.trainer import Sample, TrainStep
from libra_hpc.rollout.records import transcripts
from libra_hpc.trainer.saved import checkpoint
from libra_hpc.trainer.shards import divisor
from libra_hpc.weights.names import ReplicaPlace
from tests.chaos.harness import SHARING_PAYS, patched
from tests.example_files import KEYCHAIN_TASK
from tests.trainer.conftest import world
from tests.trainer.support import OF_FAMILY, build, make_model

from .runs import BATCH, ENGINE_MARKS, Case, trained_once

__all__ = ["world"]
pytestmark = ENGINE_MARKS

STEPS = 12
SAME_KEYS = ("vocab_size", "max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")
OF_KERNELS = {
    "gpt_oss": {"intermediate_size": 64},
    "qwen3_next": {"linear_key_head_dim": 128, "linear_value_head_dim": 128},
}
"""Sizes of a family that vLLM's kernels on CPUs need."""
LOSS = """
import torch

def by_policy_alone(tokens, low, high):
    weight = torch.exp(tokens.proximal - tokens.behaviour).clamp(max=1.0)
    return -tokens.advantages * tokens.logprobs / weight, tokens.logprobs > 0.0
"""
"""Recorded log-probabilities, which transcripts do not have, cancel out."""
KEYS = {
    "algorithm.is_truncation": 1.0,
    "optimizer.eps": 1e-5,  # Adam magnifies no rounding of gradients near 0
    "planner.time_sharing": "auto",
    "planner.switch_cost_s": 20.0,
    "train.micro_tokens": 64,
    "checkpoint.every": 0,
}


def shared(case: Case, eta: int, *changes: str) -> RunDir:
    """The run, to its end."""
    loss = case.folder / "loss.py"
    loss.write_text(LOSS)
    words = [f"{key}={value}" for key, value in (KEYS | {"algorithm.eta": eta}).items()] + [
        f"algorithm.loss={loss}:by_policy_alone",
        *changes,
    ]
    options = [word for change in words for word in ("-o", change)]
    run = case.submit("--wait", *options, *patched(case.folder, SHARING_PAYS, 0))
    assert case.ended() == "completed", case.logs()
    return run


def steps_of(run: RunDir, eta: int) -> list[TrainStep]:
    """Every step as one process would train it: what was trained, in data order."""
    found = []
    for step, path in transcripts.steps(run.transcripts).items():
        records = sorted(transcripts.read(path), key=lambda one: tuple(map(int, one.uid.split("."))))
        assert {int(one.uid.split(".")[0]) for one in records} == set(range(BATCH * (step - 1), BATCH * step))
        samples = []
        for one in records:
            used = {version for version, _ in one.versions}
            assert used <= set(range(step - 1 - eta, step)), "sampled with the weights before it"
            mask = bytes(one.prompt_tokens)
            for turn in one.turns:
                mask += bytes(turn.new_tokens) + b"\1" * turn.gen_tokens
            zeros = pack_f32([0.0] * len(mask))
            samples.append(Sample(f"{one.uid}.0", pack_i32(one.tokens), mask, zeros, one.advantage))
        found.append(TrainStep(step, 0, (tuple(samples),), (divisor(samples, "token", 1),)))
    return found


def trained_alone(run: RunDir, eta: int, policy: Path, place: ReplicaPlace, out: Path) -> None:
    """Train the run's batches in one process, and write its policy."""
    config = load_resolved(run.config)
    engine, trainer = build(policy, place, optimizer=config.optimizer, settings=config)
    for step in steps_of(run, eta):
        trainer.step(step)
    out.mkdir()
    checkpoint.write_policy(engine, policy, out)


def of_family(kind: str, folder: Path, dense: Path) -> Path:
    """A barely warm-started policy of a family, with the tokenizer of ``dense``."""
    config = json.loads((dense / "config.json").read_text())
    same = {key: config[key] for key in SAME_KEYS}
    same |= {"head_dim": 32} if "head_dim" in OF_FAMILY[kind] else {"hidden_size": 128}
    make_model(kind, folder, **same, **OF_KERNELS.get(kind, {}))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(dense / name, folder)
    code = f"""
from libra_hpc.tasks.tiny_policy import batches, learnable
from libra_hpc.trainer.sft import warm_start
task = learnable("task", {KEYCHAIN_TASK!r})
warm_start({str(folder)!r}, {str(folder)!r}, batches({str(folder)!r}, task, 0, 120), 120, lr=2e-3)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    return folder


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("core", "kind", "eta"),
    [(False, "", 0), (True, "", 0), (True, "", 1), (True, "qwen3_moe", 0), (True, "olmo3", 0), (True, "qwen2_moe", 0)],
)
def test_a_run_in_time_sharing_has_the_weights_of_one_process(
    policy: Path, tmp_path: Path, world: ReplicaPlace, core: bool, kind: str, eta: int
) -> None:
    policy = of_family(kind, tmp_path / "family", policy) if kind else policy
    case = Case(tmp_path, policy, "local", steps=STEPS)
    run = shared(case, eta, *(["components.train.roll_out=true"] if core else []))
    trained_once(run, STEPS)
    assert not case.events("illegal_transition")
    actions = [event["action"] for event in case.events("decision") if event["action"] != "hold"]
    assert actions == ["time_share"]
    rows = list(read_lines(run.metrics))
    assert [row["train_nodes"] for row in rows].count(2) >= 3, "steps of core and hybrid node"
    assert max(row["rollout_nodes"] for row in rows) == 2 + core
    assert core or max(row["train_ahead_s"] for row in rows) > 0.0, "portions went ahead"
    assert max(row["staleness_max"] for row in rows) == eta
    assert eta or max(row["logprob_gap"] for row in rows) < 1e-4, "each batch is of the weights before it"

    trained_alone(run, eta, policy, world, tmp_path / "alone")
    weights, alone = (load_file(folder / "model.safetensors") for folder in (run.policy, tmp_path / "alone"))
    start = load_file(policy / "model.safetensors")
    assert weights.keys() == alone.keys()
    assert max(float((weights[name] - start[name]).abs().max()) for name in start) > 1e-4, "it learned"
    assert max(float((weights[name] - alone[name]).abs().max()) for name in alone) <= 1e-6


@pytest.mark.nightly
@pytest.mark.parametrize(("kind", "dtype", "gap"), [("gpt_oss", "float32", 1e-4), ("qwen3_next", "bfloat16", 0.05)])
def test_a_run_of_a_family_with_layers_of_its_own_learns(
    policy: Path, tmp_path: Path, kind: str, dtype: str, gap: float
) -> None:
    start = of_family(kind, tmp_path / "family", policy)
    case = Case(tmp_path, start, "local", steps=3, hybrid=0)
    run = case.submit("--wait", "-o", f"model.dtype={dtype}", "-o", "algorithm.eta=0")
    assert case.ended() == "completed", case.logs()
    trained_once(run, 3)
    assert max(row["logprob_gap"] for row in read_lines(run.metrics)) < gap
    weights, before = (load_file(folder / "model.safetensors") for folder in (run.policy, start))
    assert max(float((weights[name].float() - before[name]).abs().max()) for name in before) > 1e-4
