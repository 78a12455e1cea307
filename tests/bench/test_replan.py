"""The simulator of re-planning: nodes move as stated, rules act as described, the live planner beats standing still."""

from __future__ import annotations

import msgspec
import pytest

from bench.replan_pool import Grouped, Layout, ReplanPool, Site, StepTruth
from bench.replan_rules import (
    SETTINGS,
    Live,
    Played,
    Schedule,
    Static,
    Tiers,
    VerlLike,
    best_schedule,
    layout_of,
    play,
    run_file,
)
from bench.replan_view import View
from bench.replan_work import DOUBLING, PERIOD, PHASE, WORKLOADS, answers_grow, curriculum, drifting, mixture, steady
from libra_hpc.models.step_times.lookup import lookup
from libra_hpc.protocol.plan import PlanSnapshot
from libra_hpc.simulator.simulate import Simulation

SITE = Site(nodes=6, prompts=8, group=4)


def _played(ends: list[float]) -> Played:
    return Played(seconds=ends[-1], tokens=1, ends=ends, moves=0, switching_s=0.0, decisions=[], repartitioned=[])


@pytest.mark.parametrize("name", WORKLOADS)
def test_work_is_whole_batches_and_drifts(name: str) -> None:
    work = drifting(WORKLOADS[name], 60, 8, 4, seed=1)
    assert len(work) == 60 * 8 * 4
    assert len({t.prompt_id for t in work}) == 60 * 8
    assert work == drifting(WORKLOADS[name], 60, 8, 4, seed=1)
    share = [
        sum(t.generated for t in part) / sum(t.context for t in part)
        for part in (work[:512], work[512:1024], work[1408:])
    ]
    assert max(share) > 2.0 * min(share)


def test_workloads_change_at_the_stated_steps() -> None:
    (early, _), (late, _) = answers_grow(0)[0], answers_grow(4 * DOUBLING)[0]
    assert late.generated == 16 * early.generated
    assert [curriculum(step)[0][0].name for step in (0, PHASE - 1, PHASE, 2 * PHASE)] == [
        "documents",
        "documents",
        "math",
        "documents",
    ]
    assert [mixture(step)[0][1] for step in (0, PERIOD / 4, PERIOD / 2, PERIOD)] == pytest.approx([0.0, 0.5, 1.0, 0.0])


def test_a_sequence_stands_for_several_that_run_in_step() -> None:
    plain = lookup("a800", "qwen3-14b", 4)
    grouped = Grouped(plain, 16)
    assert grouped.step_s(4, 4000) == plain.step_s(64, 64_000)
    assert grouped.step_s(4, 4000, 100, 500) == plain.step_s(64, 64_000, 1600, 500)
    assert grouped.kv_capacity == plain.kv_capacity // 16


def test_training_seconds_fall_with_nodes_less_than_evenly_and_scatter() -> None:
    site = msgspec.structs.replace(SITE, regroup_s=0.0)
    one, four = StepTruth(site, 1), StepTruth(site, 1)
    alone = sorted(one(100_000, 1) for _ in range(101))
    shared = sorted(four(100_000, 4) for _ in range(101))
    assert 0.25 * alone[50] < shared[50] < 0.4 * alone[50]
    assert alone[-1] > 1.2 * alone[0]
    assert one.train_nodes == [1] * 101


def test_the_first_step_after_a_change_is_longer() -> None:
    plain, changed = StepTruth(SITE, 2), StepTruth(SITE, 2)
    plain(1000, 3)
    changed(1000, 2)
    assert changed(1000, 3) - plain(1000, 3) == pytest.approx(SITE.regroup_s)


def test_a_schedule_moves_nodes_both_ways_and_every_move_takes_its_time() -> None:
    work = drifting(steady, 16, SITE.prompts, SITE.group, seed=3)
    done = play(SITE, work, Schedule([3] * 4 + [5] * 6 + [2] * 6, lead=1), 3, seed=3)
    assert len(done.ends) == 16
    assert done.moves == 2 + 3
    assert done.switching_s >= 2 * SITE.to_train_s + 3 * SITE.to_rollout_s
    assert done.tokens == play(SITE, work, Static(), 3, seed=3).tokens


def test_the_best_schedule_is_the_cheapest_path() -> None:
    slow_then_fast, fast_then_slow = [20.0 * (i + 1) for i in range(10)], [10.0 * (i + 1) for i in range(10)]
    runs = {
        2: _played(slow_then_fast + [200.0 + 10.0 * (i + 1) for i in range(10)]),
        4: _played(fast_then_slow + [100.0 + 20.0 * (i + 1) for i in range(10)]),
    }
    assert best_schedule(runs, 5.0) == [4] * 10 + [2] * 10
    assert set(best_schedule(runs, 1e6)) in ({2}, {4})


@pytest.mark.nightly
def test_the_live_planner_leaves_a_bad_split() -> None:
    work = drifting(steady, 30, SITE.prompts, SITE.group, seed=4)
    stands, moves = play(SITE, work, Static(), 1, seed=4), play(SITE, work, Live(SETTINGS, SITE), 1, seed=4)
    best = min(play(SITE, work, Static(), n, seed=4).seconds for n in range(2, SITE.nodes))
    assert moves.seconds - best < 0.25 * (stands.seconds - best)
    assert all(d.nodes and d.candidates and d.triggers for d in moves.decisions)


@pytest.mark.chaos
def test_no_drift_and_the_best_split_moves_nothing() -> None:
    work = drifting(steady, 120, SITE.prompts, SITE.group, seed=5)
    probe = work[: 24 * SITE.prompts * SITE.group]
    best = min(range(1, SITE.nodes), key=lambda n: play(SITE, probe, Static(), n, seed=5).seconds)
    rule = Live(SETTINGS, SITE)
    assert play(SITE, work, rule, best, seed=5).moves == 0
    assert rule.evaluations > 100


@pytest.mark.chaos
def test_a_curriculum_is_followed() -> None:
    work = drifting(lambda step: curriculum(step + 24), 64, SITE.prompts, SITE.group, seed=6)
    done = play(SITE, work, Live(SETTINGS, SITE), 3, seed=6)
    assert {d.action for d in done.decisions} == {"to_train", "to_rollout"}
    assert done.moves <= 8


def test_verl_activates_between_steps_when_samples_are_short_and_stops_when_they_are_not() -> None:
    work = drifting(curriculum, 24, SITE.prompts, SITE.group, seed=7)
    starved, fed = VerlLike(), VerlLike()
    play(SITE, work, starved, 5, seed=7)
    play(SITE, work, fed, 1, seed=7)
    assert starved.cycles
    assert all(seconds >= 10.0 for seconds in starved.cycles)
    assert not fed.cycles
    assert fed.ratio < 0.3 < starved.ratio


class _Once:
    """Repartitions when three steps are done, and records the engines."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.engines: list[set[int]] = []

    def act(self, pool: ReplanPool, sim: Simulation, view: View, now: float) -> None:
        if not pool.moving and not pool.repartitioned and len(sim.training.steps) > 3:
            pool.repartition(sim, self.layout)
        self.engines.append({engine.tp for engine in sim.engines.values()})


def test_ranks_are_repartitioned_at_a_step_boundary_and_every_trajectory_still_trains_once() -> None:
    work = drifting(steady, 10, SITE.prompts, SITE.group, seed=9)
    rule = _Once(Layout((1, 3), ((2, 2), (2, 2), (4, 1), (4, 1), (4, 1))))
    done = play(SITE, work, rule, 4, seed=9)
    assert done.tokens == sum(t.context for t in work)
    assert len(done.ends) == 10
    (back,) = done.repartitioned
    boundary = max(end for end in done.ends if end < back)
    assert back - boundary >= SITE.restart_s
    assert min(end for end in done.ends if end > back) > back
    used = {frozenset(tps) for tps in rule.engines}
    assert used == {frozenset({4}), frozenset(), frozenset({2, 4})}, "one TP, nothing, then two"


def test_the_run_file_of_a_site_has_its_layout() -> None:
    site = msgspec.structs.replace(SITE, core=(2, 1), model="qwen3-8b")
    assert layout_of(run_file(site, SETTINGS)) == Layout((2, 1), ((4, 1),) * 4)


@pytest.mark.nightly
def test_what_one_hybrid_node_cannot_follow_is_repartitioned() -> None:
    site = msgspec.structs.replace(SITE, core=(3, 2), model="qwen3-8b", token_s=8e-4)
    work = drifting(lambda step: curriculum(step + 24), 56, SITE.prompts, SITE.group, seed=10)
    cheap = msgspec.structs.replace(SETTINGS, repartition_cost_s=60.0, interval_s=60.0)
    done = play(site, work, Tiers(cheap, site), 3, seed=10)
    proposed = [d for d in done.decisions if d.action == "repartition"]
    assert len(proposed) == len(done.repartitioned) >= 1
    assert done.tokens == sum(t.context for t in work)


class _Watcher:
    def __init__(self) -> None:
        self.seen: list[PlanSnapshot] = []

    def act(self, pool: ReplanPool, sim: Simulation, view: View, now: float) -> None:
        self.seen.append(view.snapshot(sim))


def test_every_trajectory_of_an_open_group_waits_runs_or_is_finished_and_lengths_stay_hidden() -> None:
    watcher = _Watcher()
    work = drifting(steady, 6, SITE.prompts, SITE.group, seed=8)
    play(SITE, work, watcher, 3, seed=8)
    longest = max(t.generated for t in work)
    shares = []
    for snapshot in watcher.seen:
        assert [g.index for g in snapshot.groups] == sorted({g.index for g in snapshot.groups})
        assert len(snapshot.groups) <= (SITE.eta + 1) * SITE.prompts
        for group in snapshot.groups:
            finished = [t for t in snapshot.trajectories if t.group == group.index]
            assert group.waiting + group.running + len(finished) == SITE.group
            assert all(t.prompt == group.prompt for t in finished)
            assert group.running or not group.generated
            shares.append(group.generated / longest)
    assert max(shares) > 0.1
    final = watcher.seen[-1].trajectories
    assert all(t.prompt < t.context for t in final)
