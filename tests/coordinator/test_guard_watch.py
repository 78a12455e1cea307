"""Rank 0 and the guards of learning: what a broken policy does to a run, and what later starts make of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from libra_hpc.config.load import validate
from libra_hpc.config.run import RunConfig
from libra_hpc.coordinator.coordinator import Coordinator
from libra_hpc.coordinator.guard_watch import GuardWatch, read_guards
from libra_hpc.facts.rundir import RunDir, read_lines
from libra_hpc.facts.status import decode_status
from libra_hpc.policies.learning.guards import HOLD
from libra_hpc.protocol.layout import Layout
from tests.protocol.step_reports import step_report

from .test_coordinator import Scene, run_until_over

BREAKS = 61
"""The first step of the broken policy."""


def values(step: int) -> dict[str, float]:
    """Numbers of a run whose policy breaks: all samples fail alike."""
    if step < BREAKS:
        return {"reward": 0.8 + 0.02 * (step % 3), "reward_std": 0.3, "equal_groups": 0.3, "entropy": 0.5}
    return {"reward": -0.2, "reward_std": 0.0, "equal_groups": 1.0, "entropy": 0.01}


def play(scene: Scene, steps: Iterator[int]) -> int:
    """Commit steps until training is ordered to stop; returns the last one."""
    for step in steps:
        scene.deliver((1, step_report(step, step_s=1.0, train_nodes=1, **values(step))))
        if scene.stop:
            return step
    return 0


def scene_with(tmp_path: Path, guard: str, *checkpoints: int) -> Scene:
    scene = Scene(tmp_path, config=validate({"algorithm": {"guard": guard}}))
    for step in checkpoints:
        scene.run.checkpoint(step).mkdir(parents=True)
    return scene


@pytest.mark.parametrize(("guard", "why", "state"), [("pause", "paused", "paused"), ("stop", "broken", "failed")])
def test_a_broken_policy_ends_the_run_with_the_cause_and_the_way_on(
    guard: str, why: str, state: str, tmp_path: Path
) -> None:
    scene = scene_with(tmp_path, guard, 40, 50, 60, 70)
    last = play(scene, iter(range(1, 200)))
    assert BREAKS + HOLD < last < BREAKS + 3 * HOLD
    run_until_over(scene, last + 1)
    assert (scene.end.why, decode_status(scene.run.status.read_bytes()).state) == (why, state)
    sentence = scene.end.sentence
    assert sentence.startswith("the reward fell from 0.8")
    assert f"; step {last + 1} is saved; `libra-hpc submit --resume {scene.run.name}` goes on" in sentence
    assert sentence.endswith("with `--from-step 50` from the last good checkpoint")
    notices = [event for event in read_lines(scene.run.events) if event["kind"] == "learning_notice"]
    assert [notice["good_step"] for notice in notices] == [notices[0]["good_step"]] * len(notices)
    assert 50 <= notices[0]["good_step"] < 60


def test_the_trainers_keep_the_good_checkpoint_from_the_first_notice_on(tmp_path: Path) -> None:
    scene = scene_with(tmp_path, "pause")
    last = play(scene, iter(range(1, 200)))
    wanted = [order.good_step for rank, order in scene.orders(Layout) if rank == 1]
    assert wanted[0] == -1
    assert 50 <= wanted[-1] < 60
    (first, *_) = [event for event in events_of(scene) if event["kind"] == "learning_notice"]
    assert first["good_step"] == wanted[-1]
    assert last > first["step"]


def events_of(scene: Scene) -> list[dict[str, Any]]:
    assert scene.coordinator._records._facts.flush(10.0)
    return list(read_lines(scene.run.events))


def test_the_status_says_what_holds_and_what_follows(tmp_path: Path) -> None:
    scene = scene_with(tmp_path, "pause")
    play(scene, iter(range(1, BREAKS + 15)))
    (notice,) = scene.status().notices
    assert notice.startswith("learning notice: the reward fell from 0.8")
    assert "unless that ends, the run pauses at step " in notice


@pytest.mark.parametrize("guard", ["notice", "off"])
def test_a_run_goes_on_where_nobody_wants_it_to_end(guard: str, tmp_path: Path) -> None:
    scene = scene_with(tmp_path, guard)
    assert play(scene, iter(range(1, 200))) == 0
    noticed = [event for event in events_of(scene) if event["kind"] == "learning_notice"]
    assert bool(noticed) == (guard == "notice")


def test_rewards_of_two_phases_are_not_compared(tmp_path: Path) -> None:
    scene = scene_with(tmp_path, "pause")
    for step in range(1, 200):
        drifted = {"after_drift": float(step >= BREAKS)}
        scene.deliver((1, step_report(step, step_s=1.0, train_nodes=1, **values(step), **drifted)))
    assert not scene.stop


# --- starts ---


def written(tmp_path: Path, until: int, *starts: tuple[int, int]) -> RunDir:
    """A run of ``until`` steps; ``starts``: attempt and first step."""
    run = RunDir(tmp_path)
    lines = [json.dumps({"step": step, **values(step)}) for step in range(1, until + 1)]
    run.metrics.write_text("\n".join(lines) + "\n")
    events = [{"t": 1.0, "kind": "job_started", "attempt": attempt, "step": step} for attempt, step in starts]
    run.events.write_text("".join(f"{json.dumps(event)}\n" for event in events))
    return run


def first_action(tmp_path: Path) -> int:
    watch = GuardWatch("pause")
    return next(
        step
        for step in range(1, 200)
        if (decision := watch.observe({"step": step, **values(step)})) and decision.action == "pause"
    )


def test_a_restart_between_notice_and_pause_changes_nothing(tmp_path: Path) -> None:
    at = first_action(tmp_path)
    watch = read_guards(RunConfig(), written(tmp_path, at - 3, (1, 0)), 1, at - 3)
    assert (watch.decided, 50 <= watch.good_step < 60) == (None, True)
    found = [watch.observe({"step": step, **values(step)}) for step in range(at - 2, at + 1)]
    assert [decision and decision.action for decision in found] == [None, None, "pause"]


def test_steps_after_the_one_to_which_a_run_went_back_do_not_count(tmp_path: Path) -> None:
    at = first_action(tmp_path)
    watch = read_guards(RunConfig(), written(tmp_path, at, (1, 0), (2, 50)), 2, 50)
    assert (watch.decided, watch.good_step) == (None, -1)


def test_who_resumes_a_paused_run_gets_no_second_pause_for_the_same_fall(tmp_path: Path) -> None:
    at = first_action(tmp_path)
    for starts in ([(1, 0)], [(1, 0), (2, at + 1)]):
        watch = read_guards(RunConfig(), written(tmp_path, at + 1, *starts), 2, at + 1)
        assert (watch.decided, watch.good_step) == (None, -1)
        found = [watch.observe({"step": step, **values(step)}) for step in range(at + 2, at + 80)]
        assert {decision.action for decision in found if decision} == {"notice"}, "nothing is learned"


def test_a_planner_that_is_lost_while_the_run_pauses_pauses_it_at_the_next_start(tmp_path: Path) -> None:
    at = first_action(tmp_path)
    run = written(tmp_path, at + 1, (1, 0))
    scene = Scene(tmp_path, step=at + 1)
    guards = read_guards(RunConfig(), run, 1, at + 1)
    scene.coordinator = Coordinator(scene.context, (), guards)
    run_until_over(scene)
    assert scene.end.why == "paused"
    assert f"no checkpoint is as old as step {guards.good_step}" in scene.end.sentence
