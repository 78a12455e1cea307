"""`libra-hpc trace`: what it prints and writes, and every mistake as one line and exit code 2."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from libra_hpc_cli import output

from libra_hpc.traces.generate import Dials, generate
from libra_hpc.traces.read import read_trace

from .conftest import Cli


@pytest.mark.parametrize("preset", ["r2e", "search", "math"])
def test_generate_then_inspect(preset: str, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "WIDTH", 80)
    out = tmp_path / "a.jsonl.gz"
    made = cli("trace", "generate", str(out), "--preset", preset, "--outcome", "0.5", "--seed", "7")
    assert (made.code, made.err) == (0, "")
    assert made.out.startswith(f"{out}: 512 trajectories")
    assert read_trace(out).trajectories == generate(preset, Dials(outcome=0.5, seed=7))
    table = cli("trace", "inspect", str(out))
    assert (table.code, table.err) == (0, "")
    assert "512 trajectories of 64 prompts (64 with siblings)" in table.out
    assert "…" not in table.out
    facts = json.loads(cli("trace", "inspect", str(out), "--json").out)
    assert facts["description"]["trajectories"] == 512


def test_every_dial_arrives(tmp_path: Path, cli: Cli) -> None:
    out = tmp_path / "a.jsonl"
    dials = Dials(trajectories=96, group=4, sibling=0.4, outcome=0.9, drift=2, max_context=30000, seed=5)
    options = "--trajectories 96 --group 4 --sibling 0.4 --outcome 0.9 --drift 2 --seed 5"
    assert cli("trace", "generate", str(out), *options.split(), "--max-context", "30000").code == 0
    assert read_trace(out).trajectories == generate("r2e", dials)


def test_what_was_generated_as_json(tmp_path: Path, cli: Cli) -> None:
    printed = json.loads(cli("trace", "generate", str(tmp_path / "a.jsonl"), "--trajectories", "16", "--json").out)
    made = read_trace(tmp_path / "a.jsonl").trajectories
    assert (printed["trajectories"], printed["turns"]) == (16, sum(len(one.turns) for one in made))
    assert printed["generated_tokens"] == sum(one.generated for one in made)
