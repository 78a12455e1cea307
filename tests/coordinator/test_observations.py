"""What rank 0 makes of the reports it gets."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from libra_hpc.coordinator.observations import Observations
from libra_hpc.protocol.agents import OpenGroup, RolloutReport
from libra_hpc.protocol.plan import GroupFact


def report(busy_s: float, generated: int) -> RolloutReport:
    buckets = ((2, 4, 0, 0, 0.0), (4, 2, 0, 0, 0.0))
    return RolloutReport(generated_tokens=generated, busy_s=busy_s, buckets=buckets)


def test_the_busy_share_is_that_of_all_engines_of_all_nodes() -> None:
    seen = Observations()
    seen.on_rollout(report(0.0, 0), (3, 4), 10.0)
    seen.on_rollout(report(4.8, 900), (3, 4), 12.0)
    (window,) = seen.windows
    assert (window.nodes, window.seconds, window.generated_tokens) == (2, 2.0, 900)
    assert window.busy == pytest.approx(4.8 / (2.0 * 6)), "six engines on two nodes"


def test_the_planner_sees_prompts_and_groups_under_way() -> None:
    seen = Observations()
    seen.on_rollout(
        replace(report(0.0, 0), lengths=((90, 140, 2, 0.5, 7, 50),), open_groups=(OpenGroup(8, 60, 1, 3, 200),)),
        (3,),
        10.0,
    )
    snapshot = seen.snapshot((), 4, 4, 1, 100)
    (trajectory,) = snapshot.trajectories
    assert (trajectory.generated, trajectory.context, trajectory.group, trajectory.prompt) == (90, 140, 7, 50)
    assert snapshot.groups == (GroupFact(8, 60, 1, 3, 200),)
    assert (snapshot.sampled_groups, snapshot.sampled) == (1.0, 16.0)
    times = {"step_s": 1.0, "wait_s": 0.0}
    for replaced in (0.0, 4.0):
        seen.on_step({"trajectories": 16, "replaced_groups": replaced, **times}, 24.0)
    assert seen.snapshot((), 4, 4, 1, 100).sampled == 24.0, "two groups more a step"


def test_a_long_step_has_the_speed_of_its_whole_rollout() -> None:
    seen = Observations()
    assert seen.step_speed(0.0) == 0.0
    for second, generated in enumerate((0, 300, 600, *[600] * 21)):
        seen.on_rollout(report(0.0, generated), (3, 4), float(second))
    assert (seen.rollout_speed()[0], seen.step_speed(24.0)) == (0.0, 25.0)
    seen.on_step({"trajectories": 8, "gen_tokens": 600}, 24.0)
    for second, generated in ((24, 600), (25, 700)):
        seen.on_rollout(report(0.0, generated), (3, 4), float(second))
    assert seen.step_speed(25.0) == seen.rollout_speed()[0] == 10.0, "of the last windows"
