"""Figures of the pages: kept, shown, and refused by night where one is off; and the judge that makes some of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from bench import judge, numbers
from bench.judge import Contestant
from bench.numbers import CLAIMS, Claim, main
from bench.questions import question
from bench.scheduling import BATCHES, engines_of


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A claim of two figures that is played in a moment, in this process."""

    def play(row: str, seed: int, facts: dict[str, Any]) -> dict[str, float]:
        return {"theirs": facts["level"] + 0.1 * seed, "even": 1.0}

    claim = Claim("Toys", ["red", "blue"], play, {"theirs": "toys"}, search=lambda row: {"level": float(len(row))})
    monkeypatch.setitem(CLAIMS, "toys", claim)
    monkeypatch.setattr(numbers, "KEPT", tmp_path / "numbers.json")
    monkeypatch.setattr(numbers, "commit", lambda: "abc1234")
    return tmp_path / "numbers.json"


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    capsys.readouterr()
    assert main(["show", *arguments]) == 0
    return capsys.readouterr().out.splitlines()


def test_a_claim_is_shown_with_errors_seeds_and_commit(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["play", "toys"]) == 0
    lines = shown(capsys, "toys", "headlines")
    assert lines[0] == "Toys"
    assert lines[2].split() == ["red", "3.15", "±0.06", "1.00", "±0.00"]
    assert lines[4] == "4 seeds a row, means and standard errors; commit abc1234"
    assert lines[7].split() == ["toys", "3.62", "4.15", "3.15", "red"]


def test_a_figure_that_is_off_fails_with_its_name_and_facts_of_a_search_stay(
    kept: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    main(["play", "toys"])
    kept.write_text(kept.read_text().replace('"level": 3.0', '"level": 3.1'))
    assert main(["check", "toys"]) == 0, "within two standard errors"
    kept.write_text(kept.read_text().replace('"level": 3.1', '"level": 3.3'))
    assert main(["check", "toys/blue"]) == 0
    assert main(["check", "toys"]) == 1
    assert "toys/red, theirs: 3.350, kept 3.050" in capsys.readouterr().out


def test_an_unknown_row_is_refused_with_the_valid_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["play", "toys/green"])
    assert "valid: defaults/shipped 14B, " in capsys.readouterr().err


@pytest.mark.nightly
def test_the_figures_of_the_pages_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert main(["check"]) == 0


# --- the judge


def test_layouts_are_those_of_the_planner_and_all_nodes_colocated() -> None:
    found = judge.layouts("steady, eta 1")
    colocated = {name: plan for name, plan in found.items() if name.startswith("colocated")}
    assert {plan.nodes for plan in colocated.values()} == {3}
    assert all(sum(one.devices for one in plan.engines) == 24 for plan in colocated.values())
    assert {"1+2xTP8", "2+2xTP4", "colocated 3xTP8"} <= found.keys()


def test_a_question_has_the_work_and_the_limits_of_its_row() -> None:
    asked, before = question("sessions"), question("shipped 14B", before=True)
    assert (asked.trajectories, asked.work.group, asked.settings.async_steps) == (256, 1, True)
    assert (before.settings.max_num_seqs, before.settings.max_inflight, before.settings.async_steps) == (64, 96, False)
    large = question("shipped 14B", nodes=numbers.LARGE)
    assert sum(pool.devices for pool in large.pools) == 1024
    assert large.trajectories == 10_920


def test_a_dearer_pair_of_switches_costs_a_synchronous_batch_its_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    row, name = "steady, eta 0", "colocated 3xTP8"
    plan = judge.layouts(row)[name]
    assert plan.in_turn is not None
    cheap = judge.seconds(row, Contestant(name), 0, 1)
    dearer = replace(plan.in_turn, switch_s=plan.in_turn.switch_s + 60.0)
    monkeypatch.setitem(judge.layouts(row), name, replace(plan, in_turn=dearer))
    assert judge.seconds(row, Contestant(name), 0, 1) - cheap == pytest.approx(60.0, abs=1e-6)


def test_the_judge_finds_a_planted_best_opponent_of_each_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    def distance(row: str, one: Contestant, seed: int, least: int = 0, before: bool = False) -> float:
        far = 50 * (one.layout not in ("2+2xTP4", "colocated 6xTP4")) + 10 * (one.rule != "fit")
        return 100.0 + far + (one.limit != "live 36")

    monkeypatch.setattr(judge, "seconds", distance)
    found = judge.rivals("steady, eta 1")
    assert found["layout"].layout in ("2+2xTP4", "colocated 6xTP4")
    assert [found[kind] for kind in ("split", "colocated")] == [
        Contestant("2+2xTP4", "fit", "live 36"),
        Contestant("colocated 6xTP4", "fit", "live 36"),
    ]


def test_a_slow_engine_takes_twice_as_long() -> None:
    times = [engine.steps.step_s(1, 1_000) for engine in engines_of(BATCHES["slow engine"])]
    assert sorted(times) == [times[0]] * 3 + [2.0 * times[0]]
