"""Every screen in a terminal of 80 columns: no cell is cut, and no line leaves it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from libra_hpc_cli import output, split

from libra_hpc.hardware.models import model_shape
from tests.slurm.test_examples import EXAMPLES, model_folder
from tests.telemetry import synthetic

from .conftest import Outcome, Queue

COLUMNS = 80
SCREENS = [
    "check run.toml",
    "plan RUN.toml",
    "plan RUN.toml --explain",
    "plan RUN.toml --gpus 16..64",
    "trace inspect t.jsonl",
    "simulate t.jsonl",
    "doctor",
    "config show RUN.toml --toml --sources",
    "config explain components",
]


@pytest.mark.parametrize("screen", SCREENS)
def test_a_screen_is_whole_in_80_columns(
    screen: str, site: Path, queue: Queue, cli: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (output, split):
        monkeypatch.setattr(module, "WIDTH", COLUMNS)
    model = model_folder(site / "policy", model_shape("qwen3-14b"))
    text = (EXAMPLES / "a800-48-qwen3-14b.toml").read_text()
    (site / "RUN.toml").write_text(text)
    synthetic.make_run(site / "runs")
    words = screen.split()
    if "RUN.toml" in words:
        words += ["-o", f"model.path={model}", "-o", "slurm.time_limit=12:00:00"]
    if "t.jsonl" in words:
        cli("trace", "generate", "t.jsonl", "--trajectories", "64")
    outcome = cli(*words)
    assert outcome.code in (0, 1), outcome.err
    assert "…" not in outcome.out
    # A sentence has no cells: the terminal folds it.
    assert all(len(line) <= COLUMNS or ": " in line for line in outcome.out.splitlines())
