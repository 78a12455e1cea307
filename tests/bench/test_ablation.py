"""The ablation: every replacement finds its target, changes decisions where it should, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench import ablation
from bench.ablation import SCHEDULER_ROWS, add_seed, cell_of, fleet_of, lines
from bench.ablation_parts import PLANNER, SCHEDULER
from bench.fleets_rows import NODE, ROWS, setting_of
from bench.harness import WIDTH
from libra_hpc import compiled

from .inline import Inline

CASE = ("r2e", "mix")
TARGETS = """
from bench.ablation_parts import PLANNER, SCHEDULER, without
for name, replaced in {**SCHEDULER, **PLANNER}.items():
    before = [getattr(owner, what) for owner, what, _ in replaced]
    with without(name):
        assert [getattr(owner, what) for owner, what, _ in replaced] != before, name
    assert [getattr(owner, what) for owner, what, _ in replaced] == before, name
"""


def test_every_mechanism_can_be_switched_off_and_comes_back() -> None:
    subprocess.run([sys.executable, "-c", TARGETS], check=True, env=os.environ | {compiled.INTERPRETED: "1"})


def test_documents_take_longer_when_samples_start_anywhere(tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    command = [sys.executable, "-m", "bench.ablation", "--quick", "--seeds", "1", "--json", str(found)]
    command += ["--rows", "documents", "--only", "beside a sibling|forgetting"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert max(map(len, done.stdout.splitlines())) <= WIDTH
    cells = json.loads(found.read_text())["raw"]
    assert all(cell["mean"] > 10.0 for cell in cells if cell["off"] == "beside a sibling")


def test_an_unknown_mechanism_is_named_with_the_valid_ones() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench.ablation", "--only", "luck"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "'luck' is unknown" in done.stderr
    assert "migration in a turn" in done.stderr


def test_what_decides_alike_on_two_seeds_is_not_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[ablation.Job] = []

    def seconds(job: ablation.Job) -> float:
        ran.append(job)
        return {"": 100.0, "same": 100.0, "worse": 110.0 + job[3]}[job[2]]

    monkeypatch.setattr(ablation, "seconds", seconds)
    logs: ablation.Logs = {(CASE, "same"): [], (CASE, "worse"): []}
    for seed in range(4):
        add_seed(logs, Inline(), CASE, seed)
    assert [job[3] for job in ran if job[2] == "same"] == [0, 1]
    same, worse = (cell_of(found) for found in logs.values())
    assert (same.mean, worse.mean, worse.seeds) == (0.0, pytest.approx(10.9, abs=0.1), 4)
    assert [line[0] for line in lines(logs)] == ["worse", "same"]


@pytest.mark.parametrize("name", [name for name in SCHEDULER_ROWS if name in ROWS])
def test_all_engines_of_a_row_use_its_gpus(name: str) -> None:
    row = setting_of(name)
    for engines in SCHEDULER_ROWS[name][0]:
        gpus = row.pools[0][1] - NODE * bool(row.batches)
        assert sum(part.tp * part.engines for part in fleet_of(name, row, engines)) == gpus


def test_names_are_of_one_part_only() -> None:
    assert not set(SCHEDULER) & set(PLANNER)
