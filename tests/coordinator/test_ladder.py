"""What follows when nothing in a run progresses: the policy, and what rank 0 makes of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra_hpc.config.job import DeadlinesSection
from libra_hpc.coordinator.liveness import Ladder, Movement, Rung
from libra_hpc.protocol.agents import Heartbeat, MemberJoined, RolloutReport
from tests.policies.pool.layout_orders import RankLost
from tests.protocol.step_reports import step_report

from .test_coordinator import Scene, run_until_over, trains

IDLE = RolloutReport()
SETTINGS = DeadlinesSection(floor_s=60.0, first_s=900.0, factor=10.0)
STANDS = Movement("same", "same", False, 9, 5.0, {}, waits_for="3 turns run")


def stand(run: Movement, seconds: int = 200) -> list[tuple[int, Rung]]:
    """What a run does that stands still, by the second."""
    ladder, found = Ladder(SETTINGS, 0.0), []
    for at in range(seconds):
        rung = ladder.evaluate(run, float(at))
        if rung is not None:
            found.append((at, rung))
    return found


def test_nodes_with_old_weights_are_dropped_once_before_all_restart() -> None:
    (dropped_at, dropped), (restarted_at, restarted) = stand(STANDS._replace(versions={2: 9, 3: 7, 4: 7, 5: 8}))
    assert (dropped_at, *dropped[:2]) == (121, "drop", (3, 4))
    assert dropped.reason == (
        "nothing progressed for 121 s (limit 60 s): 3 turns run; its weights are of step 7, not 9"
    )
    assert (restarted_at, restarted.action) == (181, "restart")
    assert restarted.reason == "nothing progressed for 181 s (limit 60 s): 3 turns run"


def test_a_silent_node_is_dropped_before_one_with_old_weights() -> None:
    silent = {2: 0.5, 3: 1.0, 5: 70.0}
    (dropped_at, dropped), _ = stand(STANDS._replace(versions={2: 9, 3: 7, 5: 9}, silent_s=silent))
    assert (dropped_at, *dropped[:2]) == (121, "drop", (5,))
    assert dropped.reason.endswith("; it has been silent for 70 s")
    (_, dropped), _ = stand(STANDS._replace(versions={2: 9, 3: 7, 5: 9}, silent_s={2: 0.5, 3: 1.0, 5: 60.0}))
    assert dropped.ranks == (3,)


def test_replicas_are_dropped_where_no_node_is_silent_or_old() -> None:
    run = STANDS._replace(versions={3: 9}, replicas=frozenset({2, 4}))
    assert [(at, *rung[:2]) for at, rung in stand(run)] == [(121, "drop", (2, 4)), (181, "restart", ())]
    assert stand(run)[0][1].reason.endswith("; the core may wait for it")
    assert stand(run._replace(versions={3: 8}))[0][1].ranks == (3,)


@pytest.mark.parametrize(
    ("run", "restart_at"),
    [
        (STANDS._replace(versions={2: 9}), 181),
        (STANDS._replace(step_s=29.0), 871),
        (STANDS._replace(step_s=0.0), 2701),
        (STANDS._replace(starting=frozenset({4})), 2701),
        (STANDS._replace(least_s=120.0), 361),
    ],
    ids=["no node to drop", "slow steps", "no step yet", "a node starts", "a state is written"],
)
def test_the_limit_follows_what_the_run_does(run: Movement, restart_at: int) -> None:
    assert [(at, rung.action) for at, rung in stand(run, restart_at + 1)] == [(restart_at, "restart")]


def test_a_dropped_node_that_does_not_start_delays_nothing() -> None:
    ladder, held = Ladder(SETTINGS, 0.0), STANDS._replace(versions={4: 7})
    ladder.evaluate(held, 0.0)
    assert ladder.evaluate(held, 121.0) is not None
    away = STANDS._replace(states="lost", starting=frozenset({4}))
    assert [bool(ladder.evaluate(away, at)) for at in (122.0, 302.0, 303.0)] == [False, False, True]


def test_progress_an_excuse_and_an_own_stall_begin_again() -> None:
    assert stand(STANDS._replace(excused=True)) == []
    ladder = Ladder(SETTINGS, 0.0)
    assert not any(ladder.evaluate(STANDS._replace(mark=at // 50), float(at)) for at in range(600))
    ladder.discount(1000.0, 1599.0)
    assert ladder.evaluate(STANDS._replace(mark=11), 1729.0) is None


def standing(folder: Path, version: int) -> Scene:
    """A run after step 9, whose hybrid node rolls out with the weights of ``version``."""
    scene = Scene(folder)
    scene.coordinator._step = 7
    scene.engines(1, "train")
    scene.deliver((1, trains(joined=(MemberJoined(1, 1, 0, 0, 0.1),))))
    for rank in (2, 3):
        scene.engines(rank, "rollout")
    scene.deliver(
        (1, step_report(8, step_s=500.0)), (1, step_report(9, step_s=5.0)), (2, Heartbeat(2, "hybrid", {}, version))
    )
    return scene


def seconds(scene: Scene, now: list[float], count: int, report: RolloutReport = IDLE) -> None:
    for _ in range(count):
        now[0] += 1.0
        for contact in scene.coordinator.nodes.contacts.values():
            contact.seen = now[0]
        scene.deliver((3, report))
        scene.coordinator._check(now[0])


def test_a_run_that_stands_still_drops_the_node_with_old_weights_and_then_restarts(
    tmp_path: Path, now: list[float]
) -> None:
    scene = standing(tmp_path, 6)
    seconds(scene, now, 121)
    assert not scene.asked(RankLost)
    seconds(scene, now, 1)
    assert scene.asked(RankLost) == [RankLost(2)]
    seconds(scene, now, 181)
    assert scene.coordinator.state == "running"
    seconds(scene, now, 1)
    run_until_over(scene)
    assert scene.end.why == "lost"
    assert scene.end.sentence.startswith("nothing progressed for 181 s (limit 60 s): ")


@pytest.mark.parametrize(
    "report", [RolloutReport(tools_running=1), RolloutReport(paused="the judge is down")], ids=["tools", "pause"]
)
def test_what_has_a_limit_of_its_own_is_a_standstill_much_later(
    tmp_path: Path, now: list[float], report: RolloutReport
) -> None:
    scene = standing(tmp_path, 6)
    seconds(scene, now, 1800, report)
    assert scene.coordinator.state == "running"
    assert not scene.asked(RankLost)
    seconds(scene, now, 2, report)
    assert scene.asked(RankLost)


def test_a_part_that_hangs_again_and_again_is_no_progress_in_the_end() -> None:
    ladder, found = Ladder(SETTINGS, 0.0), []
    for at in range(1200):
        rung = ladder.evaluate(STANDS._replace(states="starting" if at % 100 > 60 else "train"), float(at))
        found += [at] if rung is not None else []
    assert found == [361 + 181, 361 + 2 * 181, 361 + 3 * 181, 361 + 4 * 181]


def test_a_late_step_names_what_is_waited_for() -> None:
    ladder = Ladder(SETTINGS, 0.0)
    starts = STANDS._replace(starting=frozenset({4}))
    ladder.evaluate(STANDS, 0.0)
    assert [ladder.late(starts, waited) for waited in (30.0, 31.0, 39.0, 61.0)] == [
        "",
        *2 * ["no step for 30 s: 3 turns run"],
        "no step for 60 s: 3 turns run",
    ]


def test_tokens_are_progress(tmp_path: Path, now: list[float]) -> None:
    scene = standing(tmp_path, 6)
    for tokens in range(10):
        seconds(scene, now, 60, RolloutReport(generated_tokens=tokens))
    assert scene.coordinator.state == "running"
    assert not scene.asked(RankLost)


USUAL, HANG = (2.6, 0.0), DeadlinesSection(floor_s=1.0, first_s=900.0, factor=10.0)


def learn(*steps: tuple[float, float]) -> list[float]:
    """Limits after each step; a step: its seconds, and for how many of them nothing progressed."""
    ladder, now, found = Ladder(HANG, 0.0), 0.0, list[float]()
    for step, (step_s, stood_s) in enumerate(steps):
        now += step_s
        run = STANDS._replace(step=step, step_s=0.0, mark=step)
        ladder.evaluate(run, now - stood_s)
        ladder.evaluate(run, now)
        run = STANDS._replace(step=step + 1, step_s=step_s, mark=now)
        ladder.evaluate(run, now)
        found.append(ladder._limit(run))
    return found


@given(st.floats(0.0, 1e6), st.floats(0.0, 1.0))
def test_a_hang_of_any_length_at_most_doubles_the_limit_of_a_step(hangs_s: float, share: float) -> None:
    found = learn(USUAL, USUAL, (2.6 + hangs_s, share * hangs_s), USUAL)
    assert found[1] == pytest.approx(26.0)
    assert max(found[1:]) <= 2.0 * found[1]


@pytest.mark.parametrize(
    ("steps", "limits"),
    [
        ([USUAL, (54.8, 52.0), USUAL], [26.0, 26.0, 26.0]),
        ([USUAL, *[(300.0, 5.0)] * 8], [26.0, 52.0, 104.0, 208.0, 416.0, 832.0, 1664.0, 3000.0, 3000.0]),
        ([(300.0, 300.0)] * 3, [1800.0, 3000.0, 3000.0]),
        ([USUAL, *[(70.0, 70.0)] * 4], [26.0, 26.0, 52.0, 104.0, 208.0]),
    ],
    ids=["one stall", "slower steps", "slow from the start", "a stall in each"],
)
def test_steps_that_stay_slow_are_learnt_and_one_with_a_stall_is_not(
    steps: list[tuple[float, float]], limits: list[float]
) -> None:
    assert learn(*steps) == pytest.approx(limits)
