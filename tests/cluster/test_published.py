"""Runs of models in the folders of their wrappers: the language model is trained, and the folder stays what it was."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from libra_hpc.facts.rundir import read_lines
from libra_hpc.models.published import text_parts
from libra_hpc.trainer.saved.checkpoint import TensorFiles
from tests.engine.engine_harness import IMAGELESS
from tests.example_files import KEYCHAIN_TASK

from .runs import ENGINE_MARKS, Case

pytestmark = ENGINE_MARKS
STEPS = 3
MAKE = """
from pathlib import Path
from libra_hpc.tasks.tiny_policy import MAX_POSITIONS, batches, learnable, write_tokenizer
from libra_hpc.trainer.sft import warm_start
from tests.engine.test_agreement import model_of
task, out = learnable("", {task!r}), Path({out!r})
model_of({kind!r}, out, 0, vocab_size=128, max_position_embeddings=MAX_POSITIONS, eos_token_id=3)
write_tokenizer(out, task.words)
warm_start(out, out, batches(out, task, 0, 60), 60)
"""


@pytest.mark.nightly
@pytest.mark.parametrize(("kind", "dtype"), [("gemma3", "float32"), ("qwen3_5", "bfloat16")])
def test_a_wrapper_is_trained_and_stays_the_folder_that_it_was(
    tmp_path: Path, kind: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(IMAGELESS))
    folder = tmp_path / "published"
    code = MAKE.format(task=KEYCHAIN_TASK, out=str(folder), kind=kind)
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
    case = Case(tmp_path, folder, "local", steps=STEPS, hybrid=0)
    run = case.submit("-o", f"model.dtype={dtype}")
    assert case.ended() == "completed", case.logs()
    lines = list(read_lines(run.metrics))
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    with TensorFiles(folder) as before, TensorFiles(run.policy) as after:
        assert sorted(before.names()) == sorted(after.names())
        for name in before.names():
            own, trained = before(name), after(name)
            if not text_parts(name, (1,)):
                assert (trained.dtype, trained.tolist()) == (own.dtype, own.tolist()), name
            elif name.endswith("embed_tokens.weight"):
                assert not torch.equal(trained, own.to(trained.dtype))
    if dtype == "float32":
        assert all(line["staleness_max"] or line["logprob_gap"] < 1e-3 for line in lines)


@pytest.mark.nightly
def test_a_mixture_is_trained_with_the_experts_of_its_rollout(tmp_path: Path) -> None:
    folder = tmp_path / "mixture"
    code = MAKE.format(task=KEYCHAIN_TASK, out=str(folder), kind="qwen3_moe")
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
    case = Case(tmp_path, folder, "local", steps=STEPS, hybrid=0)
    run = case.submit()
    assert case.ended() == "completed", case.logs()
    lines = list(read_lines(run.metrics))
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert sum(line["unrouted_tokens"] for line in lines) == 0
    assert all(line["router_agreement"] > 0.99 or line["staleness_max"] for line in lines)
