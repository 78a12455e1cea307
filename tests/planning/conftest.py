"""`libra-hpc plan` on a run file, and the run files that it plans."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from libra_hpc_cli import app, output
from libra_hpc_cli import plan as command

from libra_hpc.planning import best_plan, initial, scaling_curve
from libra_hpc.planning.request import PlanResult
from tests.conftest import shared

STAGES = ("train", "hybrid", "rollout")
NODES = "".join(f'[components.{stage}]\nnodes = 2\ngpus = 8\ngpu_type = "a800"\n' for stage in STAGES)
REST = """
[model]
path = "qwen3-14b"
[algorithm]
prompts_per_step = 16
[rollout]
max_model_len = 32768
max_num_seqs = 256
"""
RUN = NODES + REST


class Call:
    """Plans ``run.toml``."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def _run(self, *arguments: str) -> tuple[int, str, str]:
        code = app.run(("plan", "run.toml", *arguments))
        captured = self._capsys.readouterr()
        return code, captured.out, captured.err

    def shown(self, *arguments: str) -> str:
        """The output of a plan, which has notes about nothing but the file that it writes."""
        code, out, err = self._run(*arguments)
        assert (code, err == "") == (0, "--write" not in arguments), err
        return out

    def json(self, *arguments: str) -> dict[str, Any]:
        return json.loads(self.shown(*arguments, "--json"))

    def refused(self, *arguments: str) -> str:
        """The sentence of a mistake."""
        code, out, err = self._run(*arguments)
        assert (code, out, err[:7], err.count("\n")) == (2, "", "error: ", 1)
        return err


@pytest.fixture(autouse=True)
def small_plays(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How good a choice is, two modules ask; other tests play a little."""
    if request.module.__name__.rpartition(".")[2] not in ("test_best_plan", "test_in_turn"):
        request.getfixturevalue("few_batches")
        monkeypatch.setattr(best_plan, "PLAYED_TURNS", 50)


@pytest.fixture(scope="session")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Plans of all commands: many tests ask the same question."""
    return shared(tmp_path_factory) / "answers"


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], answers: Path) -> Call:
    def remembered(*asked: Any, cache: Path | None = None, **how: Any) -> PlanResult:
        return msgspec.structs.replace(best_plan.best_plans(*asked, cache=answers, **how), kept=False)

    # The library stays as it is while the tests run.
    monkeypatch.setattr(best_plan, "digest", lambda asked, _: hashlib.sha256(msgspec.json.encode(asked)).hexdigest())
    for module in (command, initial, scaling_curve):
        monkeypatch.setattr(module, "best_plans", remembered)
    # Lines that only a slow machine prints.
    monkeypatch.setattr(output, "SILENT_S", 3600.0)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(RUN)
    return Call(capsys)


def run_file(nodes: tuple[int, int, int] = (2, 2, 2), gpus: int = 8, **sections: dict[str, Any]) -> dict[str, Any]:
    """Settings of a run on A800; ``sections`` replace or add keys."""
    kind = {"gpus": gpus, "gpu_type": "a800"}
    parts = {name: {**kind, "nodes": n} for name, n in zip(STAGES, nodes, strict=True)}
    made: dict[str, Any] = {
        "slurm": {"device": "cuda"},
        "components": parts,
        "model": {"path": "qwen3-14b"},
        "rollout": {"max_model_len": 16384},
    }
    return made | {section: {**made.get(section, {}), **values} for section, values in sections.items()}
