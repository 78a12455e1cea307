"""The simulator of re-planning: work drifts, nodes move as stated, rules act as described, snapshots hide lengths."""

from __future__ import annotations

import pytest

from bench.controlled_simulation import ControlledSimulation
from bench.replan_pool import ReplanPool, Site, StepTruth
from bench.replan_rules import SETTINGS, Live, Static, VerlLike, play
from bench.replan_view import View
from bench.replan_work import WORKLOADS, curriculum, drifting
from libra_hpc.protocol.plan import PlanSnapshot
from libra_hpc.protocol.trace import TrajectoryRecord

SITE = Site(nodes=6, prompts=8, group=4)


def mixed(batches: int, seed: int) -> list[TrajectoryRecord]:
    """Work without drift."""
    return drifting(WORKLOADS["steady"], batches, SITE.prompts, SITE.group, seed=seed)


@pytest.mark.parametrize("name", WORKLOADS)
def test_work_is_whole_batches_and_drifts_unless_it_is_steady(name: str) -> None:
    work = drifting(WORKLOADS[name], 60, 8, 4, seed=1)
    assert len(work) == 60 * 8 * 4
    assert len({t.prompt_id for t in work}) == 60 * 8
    parts = work[:512], work[512:1024], work[1408:]
    share = [sum(t.generated for t in part) / sum(t.context for t in part) for part in parts]
    assert (max(share) > 2.0 * min(share)) is (name != "steady")


def test_training_seconds_fall_with_nodes_scatter_and_are_longer_after_a_change() -> None:
    one, four, changed = (StepTruth(SITE, 1) for _ in range(3))
    alone, shared = sorted(one(100_000, 1) for _ in range(101)), sorted(four(100_000, 4) for _ in range(101))
    assert 0.25 * alone[50] < shared[50] < 0.4 * alone[50]
    assert alone[-1] > 1.2 * alone[0]
    plain = StepTruth(SITE, 1)
    plain(1000, 3)
    changed(1000, 2)
    assert changed(1000, 3) - plain(1000, 3) == pytest.approx(SITE.regroup_s)


def test_a_slow_node_and_believed_costs_are_those_of_the_site() -> None:
    pool = ReplanPool(Site(nodes=6, slow=True), 1)
    slow, plain = (pool.engine(rank).steps.step_s(1, 1_000) for rank in (5, 4))
    assert slow == 2.0 * plain
    costs = []
    for believed in (1.0, 0.5):
        watcher, site = Watcher(), Site(nodes=6, prompts=8, group=4, believed=believed)
        play(site, mixed(6, 8), watcher, 3, seed=8)
        costs.append(watcher.seen[-1].step_costs[0])
    assert costs[1].base_s == 0.5 * costs[0].base_s > 0.0
    assert costs[1].kv_tokens == costs[0].kv_tokens


class Orders:
    """Moves one node after so many steps began: (steps, direction, rank)."""

    def __init__(self, *orders: tuple[int, str, int]) -> None:
        self.orders = list(orders)

    def act(self, pool: ReplanPool, sim: ControlledSimulation, view: View, now: float) -> None:
        while self.orders and len(sim.training.steps) >= self.orders[0][0]:
            _, direction, rank = self.orders.pop(0)
            pool.order(sim, direction, rank, now)


def test_nodes_move_both_ways_every_move_takes_its_time_and_nothing_is_lost() -> None:
    work = mixed(12, 3)
    done = play(SITE, work, Orders((2, "to_train", 3), (2, "to_train", 4), (7, "to_rollout", 1)), 3, seed=3)
    assert (done.steps, done.moves) == (12, 3)
    assert done.switching_s >= 2 * SITE.to_train_s + SITE.to_rollout_s
    assert done.tokens == sum(t.context for t in work)


@pytest.mark.nightly
def test_the_live_planner_leaves_a_bad_split() -> None:
    work = mixed(30, 4)
    stands, moves = play(SITE, work, Static(), 1, seed=4), play(SITE, work, Live(SETTINGS, SITE), 1, seed=4)
    best = min(play(SITE, work, Static(), n, seed=4).seconds for n in range(2, SITE.nodes))
    assert moves.seconds - best < 0.25 * (stands.seconds - best)
    assert all(d.nodes and d.candidates and d.triggers for d in moves.decisions)


def test_verl_activates_between_steps_when_samples_are_short_and_stops_when_they_are_not() -> None:
    work = drifting(curriculum, 24, SITE.prompts, SITE.group, seed=7)
    starved, fed = VerlLike(), VerlLike()
    play(SITE, work, starved, 5, seed=7)
    play(SITE, work, fed, 1, seed=7)
    assert starved.cycles
    assert all(seconds >= 10.0 for seconds in starved.cycles)
    assert not fed.cycles
    assert fed.ratio < 0.3 < starved.ratio


class Watcher:
    def __init__(self) -> None:
        self.seen: list[PlanSnapshot] = []

    def act(self, pool: ReplanPool, sim: ControlledSimulation, view: View, now: float) -> None:
        self.seen.append(view.snapshot(sim))


def test_every_trajectory_of_an_open_group_waits_runs_or_is_finished_and_lengths_stay_hidden() -> None:
    watcher, work = Watcher(), mixed(6, 8)
    play(SITE, work, watcher, 3, seed=8)
    longest, shares = max(t.generated for t in work), []
    for snapshot in watcher.seen:
        assert len(snapshot.groups) <= (SITE.eta + 1) * SITE.prompts
        for group in snapshot.groups:
            finished = [t for t in snapshot.trajectories if t.group == group.index]
            assert group.waiting + group.running + len(finished) == SITE.group
            assert all(t.prompt == group.prompt for t in finished)
            assert group.running or not group.generated
            shares.append(group.generated / longest)
    assert max(shares) > 0.1
    assert all(t.prompt < t.context for t in watcher.seen[-1].trajectories)
