"""The planner's facts on open groups."""

from __future__ import annotations

from libra_hpc.protocol.mesh import OpenGroup
from libra_hpc.rollout.open_groups import length_of, open_groups
from libra_hpc.rollout.trajectory import Trajectory


def _trajectory(index: int, sample: int, prompt: int = 50) -> Trajectory:
    trajectory = Trajectory(index=index, sample=sample, attempt=0, host=0, now=1.0)
    trajectory.prompt_tokens, trajectory.max_tokens = prompt, 100
    return trajectory


def test_groups_count_waiting_and_running_trajectories_and_tokens_so_far() -> None:
    tool, engine, waiting, unknown = (
        _trajectory(4, 0),
        _trajectory(4, 1),
        _trajectory(4, 2),
        _trajectory(7, 0, prompt=0),
    )
    tool.sent_at, tool.attained = 5.0, 30
    engine.sent_at, engine.attained, engine.place = 8.0, 10, "engine"
    assert open_groups([waiting, unknown, engine, tool], 10.0, 0.1) == (
        OpenGroup(index=4, prompt_tokens=50, waiting=1, running=2, generated=30 + 10 + 20),
    )


def test_a_turn_never_counts_more_tokens_than_its_limit() -> None:
    engine = _trajectory(0, 0)
    engine.sent_at, engine.place = 1.0, "engine"
    assert open_groups([engine], 1000.0, 0.1)[0].generated == 100
    assert open_groups([engine], 1000.0, 0.0)[0].generated == 0, "the speed is unknown"


def test_the_length_of_a_trajectory_has_its_prompt_and_index() -> None:
    assert length_of(_trajectory(3, 1)) == (0, 0, 0, 0, 3, 50)
