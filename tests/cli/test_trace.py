"""`libra-hpc trace`: what it prints and writes, and every mistake as one line and exit code 2."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from libra_hpc_cli import output

from libra_hpc.traces.generate import Dials, generate
from libra_hpc.traces.read import read_trace
from tests.facts.synthetic import MOVE, layout_lines, make_run, write

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


def test_layouts_show_what_nodes_were_to_be_and_were_at_a_time(
    tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "WIDTH", 80)
    run = make_run(tmp_path)
    first, many = MOVE[1] + 9, {rank: "rollout" if rank % 4 else "train" for rank in range(1, 1025)}
    lines = [*layout_lines((first, many), (first + 1, {**many, 7: "lost"}), (first + 2, {**many, 8: "lost"}))]
    write(run.layouts, {**lines[0], "ways": {str(rank): "mpi" for rank in many}}, lines[2])
    moving = cli("trace", "layouts", str(run.path), "--at", str(MOVE[0] + 1))
    assert (moving.code, moving.err) == (0, "")
    rows = [" ".join(line.split()) for line in moving.out.splitlines()]
    assert rows[0] == f"number 2, since {MOVE[0]:.3f}; generation 0, step 0 recorded"
    assert "1 to_train rollout 0 2" in rows
    before = json.loads(cli("trace", "layouts", str(run.path), "--json", "--at", str(first)).out)
    assert [before["rows"]["8"][name] for name in ("state", "active", "way")] == ["train", "rollout", "mpi"]
    newest = cli("trace", "layouts", str(run.path))
    assert newest.err == f"{run.layouts}: lines before number 3 are missing; number 1 is shown\n"
    assert "…" not in newest.out
    assert {"768", "1-3", "1021-1023"} <= set(newest.out.replace(",", " ").split())
    assert cli("trace", "layouts", str(run.path), "--at", "1").code == 2
