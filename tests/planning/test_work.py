"""Batches to play: whole groups of a trace, or generated with the stated means."""

from __future__ import annotations

import pytest

from libra_hpc.planning.work import Assumed, Work
from libra_hpc.protocol.trace import TrajectoryRecord, TurnRecord


def test_batches_of_a_trace_are_whole_groups_of_one_prompt() -> None:
    recorded = tuple(TrajectoryRecord(f"p{n % 5}", n // 5, 100 + n % 5, (TurnRecord(0, 10 + n),)) for n in range(30))
    work = Work(recorded, Assumed(), 4096, 4)
    batch = work.batch(8, seed=1)
    assert batch == work.batch(8, seed=1) != work.batch(8, seed=2)
    assert len(batch) == 32
    groups: dict[str, list[TrajectoryRecord]] = {}
    for one in batch:
        groups.setdefault(one.prompt_id, []).append(one)
    assert len(groups) == 8
    for group in groups.values():
        assert len({one.prompt_tokens for one in group}) == 1
        assert sorted(one.sample for one in group) == [0, 1, 2, 3]
        assert len({one.generated for one in group}) == 4, "six were recorded: no sample twice"


def test_assumed_lengths_have_the_stated_means() -> None:
    assumed = Assumed(generated=800, sigma=0.5, prompt=300, turns=4, new_tokens=50, tool_s=2.0)
    batch = Work((), assumed, 32768, 8).batch(512, seed=0)
    turns = [turn for one in batch for turn in one.turns]
    calls = len(turns) - 4096
    totals = [
        sum(one.generated for one in batch) / 4096,
        sum(one.prompt_tokens for one in batch) / 4096,
        len(turns) / 4096,
        sum(turn.tool_s for turn in turns) / calls,
        sum(turn.new_tokens for turn in turns) / calls,
    ]
    assert totals == pytest.approx([800, 300, 4, 2.0, 50], rel=0.05)
