"""Time-sharing on real engines: nodes that roll out and train each step, and the weights of a run without it."""

from __future__ import annotations

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
from tests.trainer.conftest import world
from tests.trainer.support import build

from .runs import BATCH, ENGINE_MARKS, Case, trained_once

__all__ = ["world"]
pytestmark = ENGINE_MARKS

STEPS = 20
"""On an idle machine ten are over before all engines have started; rounding grows with them."""
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


def shared(case: Case, eta: int, changes: dict[str, str]) -> RunDir:
    """The run, to its end."""
    loss = case.folder / "loss.py"
    loss.write_text(LOSS)
    keys = KEYS | {"algorithm.eta": eta, "algorithm.loss": f"{loss}:by_policy_alone"} | changes
    run = case.submit(
        "--wait",
        *(word for key, value in keys.items() for word in ("-o", f"{key}={value}")),
        *patched(case.folder, SHARING_PAYS, 0),
    )
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


@pytest.mark.nightly
@pytest.mark.parametrize(("core", "alone", "eta"), [(False, 1, 0), (True, 1, 0), (True, 0, 0), (True, 0, 1)])
def test_a_run_in_time_sharing_has_the_weights_of_one_process(
    policy: Path, tmp_path: Path, world: ReplicaPlace, core: bool, alone: int, eta: int
) -> None:
    """``alone``: nodes that only roll out."""
    case = Case(tmp_path, policy, "local", steps=STEPS, rollout=alone)
    run = shared(case, eta, {"components.train.roll_out": "true"} if core else {})
    trained_once(run, STEPS)
    actions = [event["action"] for event in case.events("decision") if event["action"] != "hold"]
    assert (actions, case.events("illegal_transition")) == (["time_share"] * alone, [])
    rows = list(read_lines(run.metrics))
    assert [row["train_nodes"] for row in rows].count(2) >= 3, "steps of core and hybrid node"
    assert max(row["rollout_nodes"] for row in rows) == 1 + core + alone
    assert core or max(row["train_ahead_s"] for row in rows) > 0.0, "portions went ahead"
    assert max(row["staleness_max"] for row in rows) == eta
    assert eta or max(row["logprob_gap"] for row in rows) < 1e-4, "each batch is of the weights before it"

    trained_alone(run, eta, policy, world, tmp_path / "alone")
    weights, alone = (load_file(folder / "model.safetensors") for folder in (run.policy, tmp_path / "alone"))
    start = load_file(policy / "model.safetensors")
    assert weights.keys() == alone.keys()
    assert max(float((weights[name] - start[name]).abs().max()) for name in start) > 1e-4, "it learned"
    assert max(float((weights[name] - alone[name]).abs().max()) for name in alone) <= 1e-6
