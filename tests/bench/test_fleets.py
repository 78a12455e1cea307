"""The judge: fleets of equal size, training by the planner's cost model, and a search
that finds the best contestant."""

from __future__ import annotations

import math
from concurrent.futures import Executor, Future
from typing import Any

import pytest

from bench import fleets_rows, fleets_search
from bench.fleets import judge, line
from bench.fleets_rows import ROWS, Setting, engines_of, fleets_of, work
from bench.fleets_search import Contestant, Effort, Search, beside, seconds
from bench.fleets_training import Roles, train_seconds

SMALL = Setting(pools=(("a800", 16),), trajectories=32)
STEADY = SMALL._replace(pools=(("a800", 24),), batches=6, eta=1)
QUICK = Effort(choosing=(1_000,), reporting=(0, 1), pairs=2, finalists=1)


class Inline(Executor):
    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(fn(*args, **kwargs))
        return done


@pytest.fixture(autouse=True)
def rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are played in a moment."""
    monkeypatch.setitem(ROWS, "small", SMALL)
    monkeypatch.setitem(ROWS, "small steady", STEADY)
    monkeypatch.setitem(ROWS, "opposite", ROWS["misleading"]._replace(trajectories=16))
    work.cache_clear()
    train_seconds.cache_clear()


def search(name: str = "small") -> Search:
    return Search(Inline(), name, QUICK, lambda text: None)


@pytest.mark.parametrize("row", [SMALL, ROWS["r2e"], ROWS["two kinds"], ROWS["long, 32B"]])
def test_all_fleets_have_all_gpus_in_whole_nodes_and_hold_the_longest_context(row: Setting) -> None:
    fleets = fleets_of(row)
    assert len(set(fleets)) == len(fleets) > 3
    for fleet in fleets:
        for pool, (_, gpus) in enumerate(row.pools):
            parts = [part for part in fleet if part.pool == pool]
            assert sum(part.tp * part.engines for part in parts) == gpus
            assert all(part.tp * part.engines % fleets_rows.NODE == 0 for part in parts)
        assert all(one.steps.kv_capacity > fleets_rows.MAX_CONTEXT for one in engines_of(row, fleet))


def test_a_slow_node_slows_the_engines_on_its_gpus() -> None:
    row = ROWS["slow node"]
    for fleet in fleets_of(row)[:4]:
        times = [engine.steps.step_s(1, 1_000) for engine in engines_of(row, fleet)]
        assert len([t for t in times if t > 1.5 * min(times)]) == row.slow // fleet[0].tp


def test_a_dearer_pair_of_switches_costs_a_synchronous_batch_its_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ROWS, "small steady", STEADY._replace(eta=0))
    some = [Contestant(fleets_of(STEADY)[3], "sticky", roles=Roles(switch_s=s)) for s in (20.0, 80.0)]
    cheap, dear = (seconds(("small steady", one, 0, math.inf, 4)) for one in some)
    assert dear - cheap == pytest.approx(60.0, abs=1e-6)


def test_training_seconds_are_those_of_the_cost_model() -> None:
    one, two, three = (train_seconds("small steady", 0, Roles(train=nodes)).seconds for nodes in (1, 2, 3))
    assert one > 1.5 * two > 0.0
    assert two > three
    assert train_seconds("small steady", 0, Roles()).seconds == three
    assert two == pytest.approx(train_seconds("small steady", 0, Roles(core=1, beside=1)).seconds, rel=0.2)


def test_misleading_outcomes_are_the_opposite_of_the_learned_ones() -> None:
    before, found = work("opposite", 0)
    assert before
    failed = [turn for one in found for turn in one.turns if turn.outcome == "error"]
    assert len(failed) > sum(len(one.turns) for one in found) / 2, "most calls succeed, and look like failures now"


def test_a_contestant_over_the_limit_has_lost() -> None:
    assert seconds(("small", Contestant(fleets_of(SMALL)[0], "sticky"), 0, 10.0, 0)) == math.inf


def test_the_search_finds_a_planted_best_contestant(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that loses without a limit of admission."""
    wanted = Contestant(fleets_of(SMALL)[-1], "la_mlfq", "share 0.3")

    def distance(job: fleets_search.Job) -> float:
        made = job[1]
        far = 5 * (made.admission != "share 0.2" and made.admission not in beside("share 0.2"))
        pairs = zip(made, wanted, (100, 50, 10, 0), strict=True)
        return 100.0 + sum(cost for mine, best, cost in pairs if mine != best) + far if made.admission else math.inf

    monkeypatch.setattr(fleets_search, "seconds", distance)
    assert search().opponents()[0] == wanted


def test_split_and_turn_keep_their_places_until_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def distance(job: fleets_search.Job) -> float:
        roles = job[1].roles
        return 100.0 + 10.0 * abs(roles.train - 2) if roles.train else 150.0 - roles.keep_kv

    monkeypatch.setattr(fleets_search, "seconds", distance)
    assert {one.roles for one in search("small steady").opponents()} == {Roles(train=2), Roles(keep_kv=True)}


def test_the_judge_reports_ours_and_the_opponent(monkeypatch: pytest.MonkeyPatch) -> None:
    def distance(job: fleets_search.Job) -> float:
        return 1_000.0 if job[1].rule == "cmlfq" else 1_500.0 + 100.0 * job[2]

    monkeypatch.setattr(fleets_search, "seconds", distance)
    row = judge(Inline(), "small", QUICK)
    assert row["x"][0] == pytest.approx(math.sqrt(1.5 * 1.6))
    assert row["x"][1] < 1.5 < 1.6 < row["x"][2]
    assert set(row["found"]) == {"ours", "opponent"}
    assert line(row)[5].startswith("1.55 (1.")


def test_the_judge_reports_a_steady_row_with_both_kinds_of_opponents(monkeypatch: pytest.MonkeyPatch) -> None:
    def distance(job: fleets_search.Job) -> float:
        roles = job[1].roles
        return 500.0 + roles.train if roles.train else 300.0 + roles.switch_s

    monkeypatch.setattr(fleets_search, "seconds", distance)
    row = judge(Inline(), "small steady", QUICK)
    assert row["found"]["opponent"]["seconds"] == [380.0, 380.0]
    assert row["found"]["split"]["seconds"] == [501.0, 501.0]
