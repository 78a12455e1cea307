"""A run with adapters on real parts: engines compute with the merged weights, and so does who loads its policy."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from libra_hpc.facts.rundir import read_lines

from .runs import ENGINE_MARKS, Case, trained_once

pytestmark = [*ENGINE_MARKS, pytest.mark.nightly]
STEPS = 4


def test_engines_have_the_merged_weights_and_a_resumed_run_goes_on(policy: Path, tmp_path: Path) -> None:
    case = Case(tmp_path, policy, "local", steps=STEPS, hybrid=0)
    # Synchronous: behaviour and policy are the same weights in every step.
    keys = ("lora.rank=8", "optimizer.lr=1e-2", "algorithm.eta=0")
    run = case.submit(*(part for key in keys for part in ("-o", key)))
    assert case.ended() == "completed"
    trained_once(run, STEPS)
    case.resume("-o", f"run.steps={STEPS + 2}")
    trained_once(run, STEPS + 2)
    assert max(row["logprob_gap"] for row in read_lines(run.metrics)) < 1e-5
    before, after = (load_file(folder / "model.safetensors") for folder in (policy, run.policy))
    moved = {name for name, weight in before.items() if not torch.equal(weight, after[name])}
    assert moved == {name for name in before if name.endswith("_proj.weight")}
