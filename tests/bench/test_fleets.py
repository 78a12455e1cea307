"""The judge: fleets of equal size, bounds that no contestant beats, and a search that finds the best contestant."""

from __future__ import annotations

import math

import pytest

from bench import fleets_rows, fleets_search
from bench.fleets import judge, line
from bench.fleets_rows import ROWS, Setting, bounds, engines_of, fleets_of, proposals, work
from bench.fleets_search import Contestant, Effort, Search, parameters_of, seconds

from .inline import Inline

SMALL = Setting(pools=(("a800", 16),), trajectories=32)
QUICK = Effort(choosing=(1_000,), reporting=(0,), pairs=2, tuned=1, finalists=1, reported=1)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(ROWS, "small", SMALL)
    work.cache_clear()
    return "small"


@pytest.mark.parametrize("row", [SMALL, ROWS["r2e"], ROWS["two kinds"], ROWS["long, 32B"]])
def test_all_fleets_have_all_gpus_in_whole_nodes(row: Setting) -> None:
    fleets = fleets_of(row, fleets_rows.MAX_CONTEXT)
    assert len(set(fleets)) == len(fleets) > 3
    for fleet in fleets:
        for pool, (_, gpus) in enumerate(row.pools):
            parts = [part for part in fleet if part.pool == pool]
            assert sum(part.tp * part.engines for part in parts) == gpus
            assert all(part.tp * part.engines % fleets_rows.NODE == 0 for part in parts)


def test_degrees_that_cannot_hold_the_longest_context_are_no_fleets() -> None:
    fleets = fleets_of(ROWS["long, 32B"], fleets_rows.MAX_CONTEXT)
    assert all(part.tp > 1 for fleet in fleets for part in fleet)


def test_the_planner_looks_at_every_degree_and_uses_whole_nodes(small: str) -> None:
    options = proposals(SMALL, work(small, 1_000)[1], fleets_rows.MAX_CONTEXT)
    assert {option.fleet[0].tp for option in options if not option.mixed} == {1, 2, 4, 8}
    for option in options:
        assert sum(part.tp * part.engines for part in option.fleet) == 16


def test_a_slow_node_slows_the_engines_on_its_gpus() -> None:
    row = ROWS["slow node"]
    for fleet in fleets_of(row, fleets_rows.MAX_CONTEXT)[:4]:
        (part,) = fleet
        times = [engine.steps.step_s(1, 1_000) for engine in engines_of(row, fleet)]
        slow = [t for t in times if t > 1.5 * min(times)]
        assert len(slow) == row.slow // part.tp


def test_nothing_is_faster_than_the_bounds(small: str) -> None:
    bound = bounds(SMALL, work(small, 0)[1], fleets_rows.MAX_CONTEXT)
    for fleet in fleets_of(SMALL, fleets_rows.MAX_CONTEXT):
        taken = seconds((small, Contestant(fleet, "sticky"), 0, math.inf))
        assert max(bound.values()) < taken < math.inf


@pytest.mark.parametrize("eta", [0, 1])
def test_nothing_is_faster_than_the_bounds_in_steady_state(eta: int, monkeypatch: pytest.MonkeyPatch) -> None:
    row = SMALL._replace(batches=5, eta=eta)
    monkeypatch.setitem(ROWS, "small steady", row)
    work.cache_clear()
    for seed in range(2):
        bound = bounds(row, work("small steady", seed)[1], fleets_rows.MAX_CONTEXT)
        fleet = fleets_of(row, fleets_rows.MAX_CONTEXT)[3]
        taken = seconds(("small steady", Contestant(fleet, "cmlfq"), seed, math.inf))
        assert 0.0 < max(bound.values()) < taken < math.inf


def test_misleading_outcomes_are_the_opposite_of_the_learned_ones() -> None:
    row = ROWS["misleading"]._replace(trajectories=16)
    ROWS["opposite"] = row
    try:
        before, found = work("opposite", 0)
        same = work("r2e", 0)[1]
    finally:
        del ROWS["opposite"]
    assert before
    failed = [turn for one in found for turn in one.turns if turn.outcome == "error"]
    assert len(failed) > sum(len(one.turns) for one in found) / 2, "most calls succeed, and look like failures now"
    assert same


def test_a_contestant_over_the_limit_has_lost(small: str) -> None:
    fleet = fleets_of(SMALL, fleets_rows.MAX_CONTEXT)[0]
    assert seconds((small, Contestant(fleet, "sticky"), 0, 10.0)) == math.inf


def test_the_search_finds_a_planted_best_contestant(small: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fleets = fleets_of(SMALL, fleets_rows.MAX_CONTEXT)
    wanted = Contestant(fleets[1], "la_mlfq", parameters_of("la_mlfq", small, 1_000, fleets[1])[2], "share 0.6")

    def distance(job: fleets_search.Job) -> float:
        made = job[1]
        pairs = zip(made, wanted, (100, 50, 20, 10), strict=True)
        return 100.0 + sum(cost for mine, best, cost in pairs if mine != best) + (made.admission == "") * 5

    monkeypatch.setattr(fleets_search, "seconds", distance)
    search = Search(Inline(), small, QUICK, lambda text: None)
    assert search.opponents(fleets)[0] == wanted


def test_a_rule_that_needs_admission_is_not_lost(small: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fleets = fleets_of(SMALL, fleets_rows.MAX_CONTEXT)

    def distance(job: fleets_search.Job) -> float:
        return 100.0 + 10.0 * (job[1].rule != "tp_sticky") if job[1].admission else math.inf

    monkeypatch.setattr(fleets_search, "seconds", distance)
    best = Search(Inline(), small, QUICK, lambda text: None).opponents(fleets)[0]
    assert best.rule == "tp_sticky"
    assert best.admission


def test_the_judge_reports_ours_and_the_opponent(small: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def distance(job: fleets_search.Job) -> float:
        return 1_000.0 if job[1].rule == "cmlfq" else 1_500.0

    monkeypatch.setattr(fleets_search, "seconds", distance)
    row = judge(Inline(), small, QUICK)
    assert row["found"]["ours"]["x"] == pytest.approx(1.5)
    assert set(row["found"]) == {"ours", "opponent", "opponent, no admission"}
    assert line(row)[5] == "1.50"
