"""`libra-hpc simulate` from the command line: its table, its JSON, its picture, and its mistakes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from libra_hpc_cli import output
from libra_hpc_cli.app import run

from libra_hpc.policies.scheduling.registry import policy_names
from libra_hpc.traces.generate import Dials, generate
from libra_hpc.traces.read import write_trace

ROOT = Path(__file__).parents[2]
ROBIN = f"{ROOT}/bench/policies/stays.py:RoundRobin"
FLEET = ["--buckets", "2xTP1,1xTP2", "--model", "qwen3-8b", "--device", "a800"]


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("traces") / "search.jsonl.gz"
    write_trace(path, generate("search", Dials(trajectories=32, seed=1)))
    return path


def simulate(*arguments: str) -> int:
    return run(["simulate", *arguments])


def test_json_has_every_policy_against_the_best(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate(str(trace), *FLEET, "--gpus", "9", "--policy", f"least_loaded,cmlfq,{ROBIN}", "--json") == 0
    out = capsys.readouterr()
    answer = json.loads(out.out)
    assert answer["gpus"] == 8
    assert "1 of 9 GPUs stay empty" in out.err
    assert list(answer["policies"]) == ["least_loaded", "cmlfq", ROBIN]
    generated = {row["generated_tokens"] for row in answer["policies"].values()}
    assert len(generated) == 1
    best_s = min(row["makespan_s"] for row in answer["policies"].values())
    for row in answer["policies"].values():
        assert row["ratio_to_best"] == pytest.approx(row["makespan_s"] / best_s)
        assert len(row["engines"]) == 6
        assert len(row["finish_s"]) == row["trajectories"] == 32


def test_every_policys_row_is_whole_no_line_is_too_long_and_a_picture_is_written(
    trace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(trace.parent)
    monkeypatch.setattr(output, "WIDTH", 80)
    policies = ",".join([*policy_names(), ROBIN])
    assert simulate(trace.name, *FLEET, "--policy", policies, "--plot", "out.svg") == 0
    out = capsys.readouterr().out
    assert "…" not in out
    assert "re-prefill: tokens computed again" in out
    assert max(map(len, out.splitlines())) <= 80
    for name in (*policy_names(), "RoundRobin"):
        assert any(len(line.split()) == 10 and line.split()[0] == name for line in out.splitlines()), name
    assert ">RoundRobin</text>" in Path("out.svg").read_text()


@pytest.mark.parametrize(
    ("options", "note"),
    [
        ("", ""),
        ("--max-context 6000", r"^\d+ of 32 trajectories end at --max-context 6,000"),
        ("--seats 4", r"least_loaded: a trajectory waits [1-9][\d,.]* s for one of 4 seats"),
    ],
)
def test_cut_trajectories_and_waits_for_seats_are_noted(
    options: str, note: str, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert simulate(str(trace), *FLEET, "--policy", "least_loaded", *options.split()) == 0
    found = capsys.readouterr().err
    assert re.search(note, found) if note else not found
