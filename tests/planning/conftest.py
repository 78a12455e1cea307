"""`libra-hpc plan` on a run file, and the run files that it plans."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from libra_hpc_cli import app

Call = Callable[..., tuple[int, str, str]]
STAGES = ("train", "hybrid", "rollout")
NODES = "".join(f'[components.{stage}]\nnodes = 2\ngpus = 8\ngpu_type = "a800"\n' for stage in STAGES)
REST = """
[model]
path = "qwen3-14b"
[algorithm]
prompts_per_step = 64
[rollout]
max_model_len = 32768
max_num_seqs = 256
"""
RUN = NODES + REST


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """Plans ``run.toml``: exit code, output, errors."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(RUN)

    def run(*arguments: str) -> tuple[int, str, str]:
        code = app.run(("plan", "run.toml", "--quick", *arguments))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


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
    for section, values in sections.items():
        made[section] = {**made.get(section, {}), **values}
    return made
