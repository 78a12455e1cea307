"""`libra-hpc trace`: what it prints and writes, and every mistake as one line and exit code 2."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from libra_hpc_cli import output

from libra_hpc.protocol.trace import TurnRecord
from libra_hpc.traces.generate import Dials, generate
from libra_hpc.traces.read import read_trace
from libra_hpc.user_file import load_file
from tests.example_files import EXAMPLES

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
    dials = Dials(
        trajectories=96, group=4, turns=6, sibling=0.4, outcome=0.9, drift=2, epochs=3, max_context=30000, seed=5
    )
    options = "--trajectories 96 --group 4 --turns 6 --sibling 0.4 --outcome 0.9 --drift 2 --epochs 3 --seed 5"
    assert cli("trace", "generate", str(out), *options.split(), "--max-context", "30000").code == 0
    assert read_trace(out).trajectories == generate("r2e", dials)


def test_what_was_generated_as_json(tmp_path: Path, cli: Cli) -> None:
    printed = json.loads(cli("trace", "generate", str(tmp_path / "a.jsonl"), "--trajectories", "16", "--json").out)
    made = read_trace(tmp_path / "a.jsonl").trajectories
    assert (printed["trajectories"], printed["turns"]) == (16, sum(len(one.turns) for one in made))
    assert printed["generated_tokens"] == sum(one.generated for one in made)


def test_the_script_in_examples_converts_rows_and_sessions(tmp_path: Path) -> None:
    script = load_file(EXAMPLES / "convert_trace.py")
    rows, session = tmp_path / "a.csv", tmp_path / "s.json"
    rows.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,4808,10\n")
    assert [(one.prompt_tokens, one.turns) for one in script.of_rows(rows)] == [(4808, (TurnRecord(0, 10),))]
    sizes = ((0, 1000, 50, 4.0), (9, 1200, 80, None), (90, 1300, 0, None), (99, 1300, 7, None), (200, 900, 5, None))
    calls = [dict(zip(("t", "in", "out", "api_time"), values, strict=True)) for values in sizes]
    session.write_text(json.dumps({"requests": [*calls, {"type": "subagent", "requests": calls}]}))
    long, short = script.of_session(session)
    turns = (TurnRecord(0, 50, "tool", tool_s=5.0), TurnRecord(150, 80, "tool", tool_s=60.0), TurnRecord(20, 7))
    assert (long.prompt_tokens, long.turns) == (1000, turns)
    assert (short.prompt_tokens, short.turns) == (900, (TurnRecord(0, 5),))
