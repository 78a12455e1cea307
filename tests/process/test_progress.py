"""The one rule for stalls, with times as arguments, and the pulse of a process that reports."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from libra_hpc.config.job import DeadlinesSection
from libra_hpc.process import progress as module
from libra_hpc.process.progress import ABORTED, TURN, ProgressWatch, Pulse, Stall, stall_of
from libra_hpc.process.retry import RestartBudget
from libra_hpc.protocol.engine_state import (
    CHECKPOINT,
    FIRST_STEPS,
    IDLE,
    LOAD,
    PAUSED,
    SERVING,
    SNAPSHOT,
    START,
    STEP,
    WEIGHTS,
    WRITE,
    Doing,
)

FLOOR, FIRST, STORAGE = 60.0, 600.0, 300.0
SETTINGS = DeadlinesSection(floor_s=FLOOR, first_s=FIRST, factor=10.0, storage_s=STORAGE)


def first_stall(progress: ProgressWatch, phase: str, **fields: Any) -> tuple[Stall, int]:
    """When a child that reports this phase every second from time 0 on is stalled first."""
    for second in range(1, 3000):
        progress.report("child", Doing({phase: float(second)}, **fields), float(second))
        if found := progress.stalled(float(second)):
            return found[0], second
    return Stall("child", "", 0.0, 0.0), 0


def child(**measured: float) -> ProgressWatch:
    """A child that began at 0, of whose phases these were measured."""
    progress = ProgressWatch(SETTINGS)
    progress.begin("child", START, 0.0)
    progress.report("child", Doing(ended=dict(measured)), 0.0)
    return progress


@pytest.mark.parametrize(
    ("phase", "measured_s", "waits", "limit_s"),
    [
        (STEP, 0.0, False, FIRST),
        (STEP, 1.0, False, FLOOR),
        (STEP, 20.0, False, 200.0),
        (STEP, 20.0, True, 600.0),
        (WEIGHTS, 7.0, False, 70.0),
        (START, 40.0, False, 400.0),
        (SNAPSHOT, 1.0, False, STORAGE),
        (CHECKPOINT, 100.0, False, STORAGE),
        (LOAD, 0.0, False, STORAGE),
        (WRITE, 1.0, False, STORAGE),
        (IDLE, 1.0, False, 0.0),
        (PAUSED, 1.0, False, 0.0),
        (SERVING, 1.0, False, 0.0),
        (FIRST_STEPS, 0.0, False, 0.0),
    ],
)
def test_a_phase_lasts_no_longer_than_its_row_allows(
    phase: str, measured_s: float, waits: bool, limit_s: float
) -> None:
    stall, second = first_stall(child(**{phase: measured_s} if measured_s else {}), phase, waits=waits)
    assert (stall.limit_s, second) == ((limit_s, limit_s + 1) if limit_s else (0.0, 0))
    if limit_s:
        others = "; it waits for peers" if waits else ""
        expected = f"child: {phase} has not ended after {limit_s + 1:.0f} s (limit {limit_s:.0f} s){others}"
        assert stall.sentence == expected


@pytest.mark.parametrize(
    ("doing", "gap_s", "limit_s"),
    [
        (Doing({STEP: 1.0}), 1.0, FLOOR),
        (Doing(), 1.0, FLOOR),
        (Doing({STEP: 1.0}), 21.0, 200.0),
        (Doing({START: 1.0}), 1.0, FIRST),
        (Doing({FIRST_STEPS: 0.0}), 1.0, FIRST),
        (Doing({SERVING: 0.0}, silence_s=1800.0), 1.0, 1800.0),
    ],
)
def test_a_child_that_reports_nothing_is_stalled_whatever_it_does(doing: Doing, gap_s: float, limit_s: float) -> None:
    progress = child(**{START: 1000.0, STEP: 1000.0})
    progress.report("child", doing, gap_s)
    progress.report("child", doing, 2 * gap_s)
    (late,) = progress.late(2 * gap_s + limit_s / 2 + 1.0)
    assert progress.late(2 * gap_s + limit_s / 2 + 2.0) == [], "reported once"
    assert not progress.stalled(2 * gap_s + limit_s)
    (stall,) = progress.stalled(2 * gap_s + limit_s + 1.0)
    assert (late.phase, stall.phase, stall.limit_s) == ("silence", "silence", limit_s)
    assert f"limit {limit_s:.0f} s); its last report: {', '.join(doing.now) or IDLE}" in stall.sentence
    progress.report("child", doing, 1e6)
    assert not progress.stalled(1e7), "it is watched no more"


def test_a_child_that_never_reports_has_the_time_of_a_start_which_its_first_report_measures() -> None:
    progress = ProgressWatch(SETTINGS)
    for name in ("a", "b"):
        progress.begin(name, START, 0.0)
    assert not progress.stalled(FIRST)
    progress.report("a", Doing(), FIRST)
    assert progress.limit(START) == 2.0 * FIRST
    (stall,) = progress.stalled(FIRST + FLOOR + 1.0)
    assert stall.key == "a", "the silence of the one, and not the start of the other"


def test_storage_that_is_slower_than_usual_is_late_long_before_it_is_stalled() -> None:
    progress, late = child(**{WRITE: 1.0}), list[tuple[int, Stall]]()
    for second in range(1, int(STORAGE) + 1):
        progress.report("child", Doing({STEP: 1.0, WRITE: float(second)}), float(second))
        late += [(second, one) for one in progress.late(float(second))]
        assert not progress.stalled(float(second))
    ((second, one),) = late
    assert (second, one.phase, one.limit_s) == (31, WRITE, STORAGE)


def test_a_limit_doubles_with_each_stall_until_one_ends_and_those_that_began_together_count_once() -> None:
    progress, limits, now = ProgressWatch(SETTINGS), [], 0.0
    for _ in range(4):
        for name in ("a", "b"):
            progress.begin(name, START, now)
        limits.append(progress.limit(START))
        assert not progress.stalled(now + limits[-1])
        now += limits[-1] + 1.0
        assert [stall.key for stall in progress.stalled(now)] == ["a", "b"]
    assert limits == [FIRST, 2 * FIRST, 4 * FIRST, 8 * FIRST]
    progress.begin("a", START, 0.0)
    progress.end("a", 20.0)
    assert progress.limit(START) == 200.0


def test_a_hang_of_all_at_most_doubles_a_limit_and_what_stays_slow_is_learnt() -> None:
    progress, limits = child(**{STEP: 1.0, WEIGHTS: 20.0}), []
    progress.report("child", Doing({STEP: 1.0}), 1.0)
    progress.report("child", Doing(ended={STEP: 1e5}), 1e5)
    assert (progress.limit(STEP), progress.limit("silence")) == (2 * FLOOR, 2 * FLOOR)
    for now in (100.0, 200.0, 300.0, 400.0):
        for act, at in ((progress.begin, (WEIGHTS, now)), (progress.end, (now + 90.0,))):
            for name in "abc":
                act(name, *at)
        limits.append(progress.limit(WEIGHTS))
    assert limits == [400.0, 800.0, 900.0, 900.0]


def test_what_is_dropped_is_never_stalled_and_teaches_nothing() -> None:
    progress = ProgressWatch(SETTINGS)
    progress.begin("a", TURN, 0.0)
    progress.drop("a")
    progress.end("a", 500.0)
    assert not progress.stalled(1e6)
    assert progress.limit(TURN) == FIRST


def test_a_stall_of_the_observer_counts_for_nobody_or_for_those_that_could_not_go_on() -> None:
    progress = child(**{STEP: 1.0})
    progress.begin("turn", TURN, 0.0)
    progress.report("child", Doing({STEP: 30.0}), 30.0)
    progress.discount(100.0)
    assert not progress.late(130.0)
    assert not progress.stalled(160.0)
    (stall,) = progress.stalled(162.0)
    assert stall.key == "child"
    progress.discount(1000.0, ["turn", "gone"])
    assert not progress.stalled(FIRST + 1100.0)
    assert progress.stalled(FIRST + 1101.0)


def test_a_turn_is_slow_then_aborted_and_then_lost() -> None:
    progress, key = ProgressWatch(SETTINGS), ("engine", "rid")
    progress.begin(key, TURN, 0.0)
    assert [late.what for late in progress.late(301.0)] == ["turn has not ended after 301 s (limit 600 s)"]
    (abort,) = progress.stalled(601.0)
    assert (abort.phase, progress.over(key)) == (TURN, True)
    assert not progress.late(640.0)
    assert not progress.stalled(661.0)
    (lost,) = progress.stalled(662.0)
    assert (lost.phase, progress.over(key)) == (ABORTED, False)
    progress.begin(key, TURN, 0.0)
    assert progress.stalled(601.0)
    progress.end(key, 620.0)
    assert progress.limit(TURN) == 1200.0, "an answer after the abort still counts from when the turn was sent"


def test_a_loop_that_wakes_about_as_planned_was_not_stopped() -> None:
    assert [stall_of(slept_s, 1.0) for slept_s in (0.9, 1.1, 2.0, 31.0)] == [0.0, 0.0, 0.0, 30.0]


def test_a_pulse_reports_nested_phases_spans_and_what_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PULSE_S", 0.02)
    sent: list[Doing] = []
    over = threading.Event()

    def send(doing: Doing) -> None:
        sent.append(doing)
        if over.is_set():
            raise BrokenPipeError

    def seen() -> Doing:
        count = len(sent)
        while len(sent) < count + 2:
            time.sleep(0.005)
        return sent[-1]

    pulse = Pulse(send)
    assert seen().now.keys() == {START}
    pulse.end()
    with pulse.phase(STEP):
        time.sleep(0.1)
        pulse.begin(WRITE)
        with pulse.phase(SNAPSHOT):
            assert seen().now.keys() == {SNAPSHOT, WRITE}
            time.sleep(0.3)
        with pulse.waiting():
            doing = seen()
    assert doing.waits
    assert doing.now[WRITE] > 0.3
    assert 0.1 < doing.now[STEP] < doing.now[WRITE], "it began first, but the inner phase stopped its clock"
    pulse.end(WRITE)
    pulse.end(WRITE)
    assert seen() == Doing(), "idle"
    ended: dict[str, float] = {}
    for one in sent:
        ended |= one.ended
    assert ended.keys() == {START, STEP, SNAPSHOT, WRITE}
    assert ended[SNAPSHOT] > 0.3
    over.set()


def test_a_budget_counts_restarts_per_time_not_in_all() -> None:
    budget = RestartBudget(restarts=2, window_s=10.0)
    assert all(budget.spend(20.0 * i) for i in range(50))
    assert [budget.spend(at) for at in (1000.0, 1001.0, 1002.0, 1013.0)] == [True, True, False, True]
