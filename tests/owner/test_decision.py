"""What follows the end of all ranks: the table of the owner's one decision."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from libra_hpc.config.load import validate
from libra_hpc.config.run import RunConfig
from libra_hpc.owner.decision import START_TRIES, RanksEnded, SoFar, decide
from libra_hpc.owner.owner import EARLY_S, LAST_S, STRAGGLERS_S, EndPatience
from libra_hpc.owner.rank_links import RankLinks
from libra_hpc.protocol.ranks_stop import FewerNodes, RanksStop, Why

LIMITS = validate({"slurm": {"restarts": 3, "requeues": 5, "preempted": "stop"}})
ALLOWED = validate({"slurm": {"restarts": 3, "requeues": 5}})
NEVER = validate({"slurm": {"restarts": 3, "preempted": "stop"}})
LOST = "node 1 was lost"
DOWN = "Slurm set node a800-3 down: a broken fan, since 2026-11-24 09:26:36"
FEWER = FewerNodes(f"{DOWN}: going on with 4 of 5 nodes", {"components.rollout.nodes": 1}, (4,))
SAID = {"lost": LOST, "defect": "node 3: MemoryError", "fatal": "node 2: engine r2.0 ended 5 times"}
DEFECT = RanksStop("defect", SAID["defect"], 40)
OTHER = RanksStop("defect", "node 17: MemoryError", 40)


def left(why: Why | None, step: int = 40, **seen: Any) -> RanksEnded:
    """What ranks left that ended for a reason; None: rank 0 was killed."""
    record = None if why is None else RanksStop(why, SAID.get(why, "step 40 is saved"), step)
    return RanksEnded(record, **{"step": step, **seen})


CASES: dict[str, tuple[RanksEnded, SoFar, RunConfig, str, str]] = {
    "the last step": (left("completed"), SoFar(), LIMITS, "stop", "completed"),
    "the last step on a notice": (left("completed", signal="USR1"), SoFar(), LIMITS, "stop", "completed"),
    "nothing to go on with": (left("fatal"), SoFar(), LIMITS, "fail", "failed"),
    "no writes": (left("storage"), SoFar(), LIMITS, "fail", "failed"),
    "a fault during a preemption": (left("fatal", signal="TERM", preempted=True), SoFar(), LIMITS, "fail", "failed"),
    "learning broke, and the run is to stop": (left("broken"), SoFar(), LIMITS, "fail", "failed"),
    # Stops.
    "learning broke": (left("paused"), SoFar(), LIMITS, "stop", "paused"),
    "a pause, and the last notice": (left("paused", signal="USR1"), SoFar(), LIMITS, "stop", "paused"),
    "a pause, and a preemption": (left("paused", signal="TERM", preempted=True), SoFar(), LIMITS, "stop", "paused"),
    "somebody cancelled it": (left("cancelled", signal="TERM"), SoFar(), LIMITS, "stop", "cancelled"),
    "somebody asked for the end": (left("cancelled", asked=True), SoFar(), LIMITS, "stop", "cancelled"),
    "killed after a cancel": (left(None, signal="TERM"), SoFar(), LIMITS, "stop", "cancelled"),
    "a loss after a cancel": (left("lost", signal="TERM"), SoFar(), LIMITS, "stop", "cancelled"),
    "a repartition and a cancel": (left("repartition", signal="TERM"), SoFar(), LIMITS, "stop", "cancelled"),
    "a cancel before a start": (left(None, met=False, signal="TERM"), SoFar(), LIMITS, "stop", "cancelled"),
    # Requeues.
    "the time limit": (left("time_limit"), SoFar(), LIMITS, "requeue", "time_limit"),
    "its last notice": (left("time_limit", signal="USR1"), SoFar(), LIMITS, "requeue", "time_limit"),
    "killed after the notice": (left(None, signal="USR1"), SoFar(), LIMITS, "requeue", "time_limit"),
    "cancelled at the time limit": (left("time_limit", signal="TERM"), SoFar(), LIMITS, "stop", "time_limit"),
    "no requeue is allowed": (left("time_limit"), SoFar(), NEVER, "stop", "time_limit"),
    "all requeues are used": (left("time_limit"), SoFar(requeued=5), LIMITS, "stop", "time_limit"),
    "one start without a step": (left("time_limit"), SoFar(idle=(20, 40)), LIMITS, "requeue", "time_limit"),
    "two starts without a step": (left("time_limit"), SoFar(idle=(20, 40, 40)), LIMITS, "fail", "failed"),
    "a step after two without": (left("time_limit", 41), SoFar(idle=(40, 40)), LIMITS, "requeue", "time_limit"),
    "a preemption": (left("cancelled", signal="TERM", preempted=True), SoFar(), NEVER, "requeue", "cancelled"),
    "a preemption by its notice": (left("time_limit", preempted=True), SoFar(), NEVER, "requeue", "time_limit"),
    "killed by a preemption": (left(None, signal="TERM", preempted=True), SoFar(), NEVER, "requeue", "cancelled"),
    "preempted and unwanted": (left("time_limit", preempted=True, asked=True), SoFar(), LIMITS, "stop", "time_limit"),
    # Starts inside the job.
    "a repartition": (left("repartition"), SoFar(restarts=3), LIMITS, "restart", ""),
    "a lost leader": (left("lost"), SoFar(restarts=2), LIMITS, "restart", ""),
    "a lost leader, once too often": (left("lost"), SoFar(restarts=3), LIMITS, "fail", "failed"),
    "a lost planner": (left(None), SoFar(), LIMITS, "restart", ""),
    "a defect": (left("defect"), SoFar(), LIMITS, "restart", ""),
    "a defect, once too often": (left("defect"), SoFar(restarts=3), LIMITS, "fail", "failed"),
    "the same defect at the same step": (left("defect"), SoFar(defect=DEFECT), LIMITS, "fail", "failed"),
    "the same defect of another node": (left("defect"), SoFar(defect=OTHER), LIMITS, "fail", "failed"),
    "the same defect later": (left("defect", 41), SoFar(defect=DEFECT), LIMITS, "restart", ""),
    "no meeting": (left(None, met=False), SoFar(), LIMITS, "repeat", ""),
    # Slurm has taken a node from the job.
    "a lost leader, and too few nodes": (left("lost", short=DOWN), SoFar(), ALLOWED, "requeue", "cancelled"),
    "no meeting, and too few nodes": (left(None, met=False, short=DOWN), SoFar(), ALLOWED, "requeue", "cancelled"),
    "a repartition, and too few nodes": (left("repartition", short=DOWN), SoFar(), ALLOWED, "requeue", "cancelled"),
    "too few nodes, and no requeue": (left("lost", short=DOWN), SoFar(), LIMITS, "fail", "failed"),
    "too few nodes, and all restarts used": (left("lost", short=DOWN), SoFar(restarts=3), ALLOWED, "fail", "failed"),
    "too few nodes, and a layout for them": (left("lost", short=DOWN, fewer=FEWER), SoFar(), LIMITS, "restart", ""),
    "no meeting, and a layout for them": (
        left(None, met=False, short=DOWN, fewer=FEWER),
        SoFar(),
        LIMITS,
        "repeat",
        "",
    ),
    "the last step, and too few nodes": (left("completed", short=DOWN), SoFar(), ALLOWED, "stop", "completed"),
    "cancelled, and too few nodes": (left(None, signal="TERM", short=DOWN), SoFar(), ALLOWED, "stop", "cancelled"),
    # Slurm has queued a component of one node again, and ends the others.
    "a broken job": (left(None, signal="TERM", broken=DOWN), SoFar(), ALLOWED, "requeue", "cancelled"),
    "a broken job, seen before its signal": (left("lost", broken=DOWN), SoFar(), ALLOWED, "requeue", "cancelled"),
    "a broken job that was saved": (left("cancelled", 40, broken=DOWN), SoFar(), ALLOWED, "requeue", "cancelled"),
    "a broken job at its time limit": (left("time_limit", broken=DOWN), SoFar(), ALLOWED, "requeue", "cancelled"),
    "a broken job, and no requeue": (left(None, signal="TERM", broken=DOWN), SoFar(), LIMITS, "fail", "failed"),
    "a broken job that is to stop": (left("cancelled", asked=True, broken=DOWN), SoFar(), ALLOWED, "stop", "cancelled"),
    "a broken job with the last step": (left("completed", broken=DOWN), SoFar(), ALLOWED, "stop", "completed"),
    "a broken job with a defective run": (left("fatal", broken=DOWN), SoFar(), ALLOWED, "fail", "failed"),
    # What is not possible now.
    "out of reach at the first start": (left("unmet", met=False), SoFar(), LIMITS, "fail", "failed"),
    "out of reach, and once they met": (left("unmet", met=False), SoFar(9, met=True), LIMITS, "repeat", ""),
    "no meeting, and once they met": (left(None, met=False), SoFar(9, met=True), LIMITS, "repeat", ""),
    "no process can be started": (left(None, met=False, cannot="fork"), SoFar(9), LIMITS, "repeat", ""),
    "no meeting for too long": (left(None, met=False, patient=False), SoFar(9, met=True), LIMITS, "fail", "failed"),
    "no meeting, and cancelled": (
        left("unmet", met=False, signal="TERM"),
        SoFar(met=True),
        LIMITS,
        "stop",
        "cancelled",
    ),
    "no meeting, and a request": (left(None, met=False, asked=True), SoFar(met=True), LIMITS, "stop", "cancelled"),
    "no meeting again": (left(None, met=False), SoFar(tries=START_TRIES), LIMITS, "fail", "failed"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_follows(case: str) -> None:
    ended, so_far, limits, word, state = CASES[case]
    decision = decide(ended, so_far, limits)
    assert (decision.word, decision.state if state else "") == (word, state)


def test_only_a_loss_uses_up_a_restart_and_a_meeting_ends_the_row_of_tries() -> None:
    so_far = SoFar(tries=2, restarts=1)
    assert decide(left("repartition"), so_far, LIMITS).so_far == SoFar(1, 1)
    assert decide(left("lost"), so_far, LIMITS).so_far == SoFar(1, 2)
    assert decide(left("defect"), so_far, LIMITS).so_far == SoFar(1, 2, DEFECT)
    assert decide(left("lost"), so_far._replace(defect=DEFECT), LIMITS).so_far.defect is None
    unmet = "start 2: the agents did not meet"
    assert decide(left(None, met=False), so_far, LIMITS).so_far == SoFar(3, 1, first=unmet)


def test_who_gives_up_names_the_first_cause_what_is_saved_and_how_to_go_on() -> None:
    so_far = decide(left("unmet", met=False), SoFar(met=True), LIMITS).so_far
    limits = LIMITS.changed(deadlines={"cannot_now_s": 90.0})
    given_up = decide(left(None, met=False, patient=False, cause="agent-0: killed", run="grpo-001"), so_far, limits)
    how = "for 90 s; step 40 is saved; continue with `libra-hpc submit --resume grpo-001`"
    assert given_up.reason == f"{so_far.first}, {how}"
    assert so_far.first.startswith("start 1: the agents did not meet; ")


CAUSE = "agent-2: RuntimeError: can't start new thread"
AGAIN = "Slurm ends a job with a component of one node, so it is queued again"
IDLE = "the last 2 starts saved no step after step 40: slurm.time_limit is too short"


@pytest.mark.parametrize(
    ("ended", "so_far", "limits", "sentence"),
    [
        (left("lost"), SoFar(), LIMITS, LOST),
        (left(None, cause=CAUSE), SoFar(), LIMITS, f"the planner's agent (rank 0) was lost; {CAUSE}"),
        (left(None, met=False, cause=CAUSE), SoFar(), LIMITS, f"start 1: the agents did not meet; {CAUSE}"),
        (left("lost"), SoFar(restarts=3), LIMITS, f"{LOST}, and all 3 restarts of slurm.restarts are used; continue"),
        (left("defect"), SoFar(defect=DEFECT), LIMITS, "node 3: MemoryError, a second time at step 40"),
        (left("time_limit"), SoFar(requeued=1), LIMITS, "time limit at step 40; requeue 2 of 5"),
        (left("time_limit"), SoFar(requeued=5), LIMITS, "time limit at step 40, and all 5 of slurm.requeues are used"),
        (left("time_limit"), SoFar(idle=(40, 40)), LIMITS, IDLE),
        (left("lost", short=DOWN), SoFar(), ALLOWED, f"{LOST}; {DOWN}; without a spare node the job is queued again"),
        (left("lost", short=DOWN, fewer=FEWER), SoFar(), LIMITS, f"{LOST}; going on with 4 of 5 nodes"),
        (
            left("lost", short=DOWN, fewer=FewerNodes(f"{DOWN}: none")),
            SoFar(),
            ALLOWED,
            f"{LOST}; {DOWN}: none; without a",
        ),
        (left(None, signal="TERM", broken=DOWN), SoFar(), ALLOWED, f"{DOWN}; {AGAIN}"),
    ],
)
def test_the_reason_is_a_sentence(ended: RanksEnded, so_far: SoFar, limits: RunConfig, sentence: str) -> None:
    assert decide(ended, so_far, limits).reason.startswith(sentence)


def test_a_run_that_is_not_queued_again_says_what_is_saved() -> None:
    used = decide(left("time_limit"), SoFar(requeued=5), LIMITS)
    assert used.message == f"step 40 is saved; not queued again: {used.reason}"


def test_ranks_that_wait_for_one_that_left_why_it_cannot_meet_them_are_killed_soon() -> None:
    patience, ranks = EndPatience(), SimpleNamespace(links=RankLinks(4), size=4)
    assert not patience.ends(ranks, True, 100.0)  # type: ignore[arg-type]
    assert patience.ends(ranks, True, 100.1 + EARLY_S)  # type: ignore[arg-type]


@pytest.mark.parametrize(("recorded", "limit_s"), [(True, LAST_S), (False, STRAGGLERS_S)])
def test_ranks_that_outlive_the_others_are_killed_sooner_where_rank_0_has_saved(recorded: bool, limit_s: float) -> None:
    patience, ranks = EndPatience(), SimpleNamespace(links=RankLinks(4), size=4)
    ranks.links.met, ranks.links.gone[1] = True, 0.0
    assert not any(patience.ends(ranks, False, float(at)) for at in range(200))  # type: ignore[arg-type]
    ranks.links.gone[0] = 200.0
    killed = (at for at in range(200, 400) if patience.ends(ranks, recorded, float(at)))  # type: ignore[arg-type]
    assert next(killed) - 200 == limit_s + 1
