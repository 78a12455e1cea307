"""The harness: command lines, lines of a table, and the JSON file; and a short soak."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.chaos import soaked
from bench.harness import WIDTH, options, report, seeds, spread

ROWS = ("short", "long, cold")


def test_help_names_the_rows(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        options("x", "", rows=("code 20%", "code 40%"), arguments=["--help"])
    assert "code 20%|code 40%" in capsys.readouterr().out


def test_an_option_has_the_type_of_its_default() -> None:
    arguments = ["--seeds", "2", "--rows", "short", "--clock", "CPU", "--caches", "8,9", "--deep", "--scale", "0.5"]
    given = options(
        "x", "", rows=ROWS, arguments=arguments, seeds=3, clock=("wall", "CPU"), caches=[48], deep=False, scale=1.0
    )
    assert (given.rows, options("x", "", rows=ROWS, arguments=[]).rows) == (["short"], list(ROWS))
    assert (given.clock, given.caches, given.deep, given.scale) == ("CPU", [8, 9], True, 0.5)
    assert list(seeds(given)) == [0, 1]


@pytest.mark.parametrize("arguments", [["--rows", "luck"], ["--seeds", "0"]])
def test_a_wrong_option_ends_the_command_with_what_is_valid(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        options("x", "", rows=ROWS, seeds=3, arguments=arguments)
    assert "valid: short, long, cold" in (error := capsys.readouterr().err) or "--seeds must be at least 1" in error


def test_figures_of_seeds_have_a_range() -> None:
    assert spread([2.0, 1.0, 4.0]) == "2.00 (1.00..4.00)"


def test_the_report_is_a_table_and_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = options("x", "", arguments=["--json", str(tmp_path / "new" / "x.json")])
    report(given, "Title", columns=["row", "s"], rows=[["short", 1.23456]], notes=["a " * 90], raw={"short": [1.23456]})
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert any(line.split() == ["short", "1.23"] for line in lines)
    written = json.loads((tmp_path / "new" / "x.json").read_text())
    assert (written["benchmark"], written["raw"]) == ("x", {"short": [1.23456]})


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [0, 1])
def test_a_short_soak_loses_no_saved_step_and_counts_nothing_twice(tmp_path: Path, seed: int) -> None:
    end = soaked(tmp_path / "soak", 8.0, 80.0, seed)
    assert (end["state"], end["lost"], end["once"]) == ("cancelled", 0, True), end
    assert len(end["faults"]) >= 8
    assert end["gap_s"] < 90.0, "a busy machine is no fault"
