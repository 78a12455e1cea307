"""What rank 0 makes of the reports it gets."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from libra_hpc.coordinator.observations import Observations
from libra_hpc.facts.columns import COLUMNS
from libra_hpc.protocol.agents import RolloutReport
from libra_hpc.protocol.engine_state import WeightUpdate
from libra_hpc.protocol.joining import FIRST_GUEST
from libra_hpc.protocol.plan import GroupFact, TrajectoryFact


def report(busy_s: float, generated: int) -> RolloutReport:
    buckets = ((2, 4, 0, 0, 0.0), (4, 2, 0, 0, 0.0))
    return RolloutReport(generated_tokens=generated, busy_s=busy_s, buckets=buckets)


def test_the_busy_share_is_that_of_all_engines_of_all_nodes() -> None:
    seen = Observations()
    seen.on_rollout(report(0.0, 0), (3, 4), 10.0)
    seen.on_rollout(report(4.8, 900), (3, 4), 12.0)
    (window,) = seen.windows
    assert (window.seconds, window.generated) == (2.0, 900)
    assert window.busy == pytest.approx(4.8 / (2.0 * 6)), "six engines on two nodes"


def test_guests_count_as_own_nodes_by_their_gpus_and_their_share_of_the_time() -> None:
    seen = Observations()
    for second, lent in ((10.0, 0.0), (11.0, 0.0), (12.0, 8.0)):
        seen.on_rollout(replace(report(0.0, 0), lent_gpus=lent), (3, 4), second)
    # Two nodes have four engines with TP 2 and two with TP 4.
    assert [window.lent for window in seen.windows] == [0.0, 1.0]


def test_lenders_that_flap_are_not_counted_on() -> None:
    seen = Observations()
    for second in range(240):
        guests = 8.0 * ((second < 120 and second % 4 < 3) or second >= 120)
        seen.on_rollout(replace(report(0.0, 0), lent_gpus=guests), (3, 4), float(second))
        if second == 119:
            assert seen.lent() == 0.0
    assert seen.lent() == 1.0


def test_the_planner_sees_prompts_and_groups_under_way() -> None:
    seen = Observations()
    seen.on_rollout(
        replace(
            report(0.0, 0),
            lengths=(TrajectoryFact(-1, 0.0, 90, 140, 2, 0.5, 7, 50),),
            open_groups=(GroupFact(8, 60, 1, 3, 200),),
        ),
        (3,),
        10.0,
    )
    snapshot = seen.snapshot((), 4, 4, 1, 100)
    (trajectory,) = snapshot.trajectories
    assert (trajectory.generated, trajectory.context, trajectory.group, trajectory.prompt) == (90, 140, 7, 50)
    assert snapshot.groups == (GroupFact(8, 60, 1, 3, 200),)
    assert snapshot.sampled_groups == 1.0
    times = {"step_s": 1.0, "wait_s": 0.0}
    for replaced in (0.0, 4.0):
        seen.on_step({"trajectories": 16, "replaced_groups": replaced, **times}, 24.0)
    assert seen.snapshot((), 4, 4, 1, 100).sampled_groups == 1.5, "two groups more a step"


def test_a_batch_between_two_reports_has_the_speed_of_its_own_step() -> None:
    seen, batch = Observations(), {"gen_tokens": 306.0, "step_s": 1.7}
    for second in (10.0, 11.0):
        seen.on_rollout(report(0.0, 0), (3, 4), second)
    assert seen.step_speed(batch, 11.7) == pytest.approx(180.0)
    seen.on_rollout(report(0.5, 306), (3, 4), 12.0)
    assert seen.step_speed(batch, 12.1) == 153.0, "of the windows"


NOTHING = {"gen_tokens": 0.0, "step_s": 1.0}


def test_a_long_step_has_the_speed_of_its_whole_rollout() -> None:
    seen = Observations()
    assert seen.step_speed(NOTHING, 0.0) == 0.0
    for second, generated in enumerate((0, 300, 600, *[600] * 21)):
        seen.on_rollout(report(0.0, generated), (3, 4), float(second))
    assert (seen.rollout_speed()[0], seen.step_speed(NOTHING, 24.0)) == (0.0, 25.0)
    seen.on_step({"trajectories": 8, "gen_tokens": 600}, 24.0)
    for second, generated in ((24, 600), (25, 700)):
        seen.on_rollout(report(0.0, generated), (3, 4), float(second))
    assert seen.step_speed(NOTHING, 25.0) == seen.rollout_speed()[0] == 10.0, "of the last windows"


def test_a_steps_new_weights_cost_what_the_slowest_serving_engine_took() -> None:
    seen = Observations()
    seen.on_step({"t": 100.0, "step": 7, "trajectories": 8}, 100.0)
    one = WeightUpdate(7, pause_s=0.002, stage_s=0.3, recomputed=40, wire_s=0.1, image_s=0.2)
    assert seen.update_costs([]) == {}
    updates = [(3, one, 100.6), (4, replace(one, pause_s=0.001, stage_s=0.4), 100.8)]
    costs = seen.update_costs([*updates, (FIRST_GUEST, replace(one, stage_s=9.0), 109.0)])
    assert costs.pop("update_s") == pytest.approx(0.8), "since the commit of its step"
    expected = {"wire_s": 0.1, "image_s": 0.2, "stage_s": 0.4, "pause_s": 0.002, "dropped_kv_tokens": 80}
    assert costs == expected
    assert costs.keys() <= {column.name for column in COLUMNS}
    assert "update_s" not in seen.update_costs([(3, replace(one, version=0), 110.0)]), "its commit is not known"
