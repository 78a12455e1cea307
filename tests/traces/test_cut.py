"""Trajectories end at the longest context as they do in a run."""

from __future__ import annotations

from libra_hpc.protocol.trace import TrajectoryRecord, TurnRecord
from libra_hpc.traces.cut import cut_at

LONG = TrajectoryRecord(
    prompt_id="p",
    sample=0,
    prompt_tokens=100,
    turns=(TurnRecord(0, 50, tool="bash", tool_s=1.0), TurnRecord(30, 40, tool="bash"), TurnRecord(200, 10)),
    reward=1.0,
)


def lengths(max_context: int) -> list[list[int]]:
    return [[turn.gen_tokens for turn in one.turns] for one in cut_at([LONG], max_context).trajectories]


def test_a_trajectory_within_the_limit_stays_as_it_is() -> None:
    assert LONG.context == 430
    assert cut_at([LONG], 430) == ([LONG], 0, 0)


def test_an_answer_ends_with_the_context() -> None:
    assert lengths(429) == [[50, 40, 9]]
    assert lengths(200) == [[50, 20]]
    assert lengths(120) == [[20]]


def test_a_tool_result_that_fills_the_context_ends_the_trajectory() -> None:
    assert lengths(420) == lengths(220) == [[50, 40]]
    assert lengths(180) == [[50]]
    (one,) = cut_at([LONG], 180).trajectories
    assert one.turns[-1].tool is None
    assert one.reward == 0.0


def test_a_prompt_without_room_is_left_out_and_counted() -> None:
    assert cut_at([LONG, LONG], 100) == ([], 0, 2)
