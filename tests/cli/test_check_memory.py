"""`libra-hpc check` prints what the run takes of GPUs and hosts, in 80 columns and as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from libra_hpc.models.shapes import model_shape
from tests.slurm.test_examples import EXAMPLES, model_folder

from .conftest import Cli


@pytest.fixture
def arguments(site: Path) -> tuple[str, ...]:
    (site / "examples").symlink_to(EXAMPLES)
    folder = model_folder(site / "policy", model_shape("qwen3-4b"))
    return ("check", str(EXAMPLES / "a800-8.toml"), "-o", f"model.path={folder}", "-o", f"run.dir={site}")


def test_the_table_has_every_kind_of_memory(cli: Cli, arguments: tuple[str, ...]) -> None:
    outcome = cli(*arguments)
    assert outcome.code == 0, outcome.err
    lines = outcome.out.splitlines()
    assert max(len(line.rstrip()) for line in lines[:-1]) <= 80
    for row in ("memory, GB", "train GPU", "rollout GPU at TP2", "the node", "  its /dev/shm"):
        assert any(row in line for line in lines), outcome.out


def test_terms_are_bytes_in_json_and_add_up(cli: Cli, arguments: tuple[str, ...]) -> None:
    outcome = cli(*arguments, "--json")
    records = json.loads(outcome.out)["memory"]
    assert [record["where"] for record in records][:1] == ["train GPU"]
    for record in records:
        assert record["needs"] == pytest.approx(sum(record["terms"].values()))
        assert record["has"] is None or record["has"] > 0
