"""The work of a run: whole groups of a trace, means as they were said, and several tasks by weight."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from libra_hpc.config.load import validate
from libra_hpc.protocol.trace import TrajectoryRecord, TurnRecord
from libra_hpc.traces.read import write_trace
from libra_hpc.traces.run_work import Work, WorkPart, run_work


def work_of(longest: int, **task: Any) -> Work:
    return run_work(validate({"rollout": {"max_model_len": longest}, "task": task}))


def test_batches_of_a_trace_are_whole_groups_of_one_prompt() -> None:
    recorded = tuple(TrajectoryRecord(f"p{n % 5}", n // 5, 100 + n % 5, (TurnRecord(0, 10 + n),)) for n in range(30))
    work = Work((WorkPart(recorded),), 4)
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


def test_lengths_have_the_stated_means() -> None:
    mean = {"turns": 4, "prompt_tokens": 300, "answer_tokens": 200, "observation_tokens": 50, "tool_s": 2.0}
    work = work_of(32768, work={**mean, "spread": 0.5})
    assert work.source == "4 turns, prompts of 300 tokens, 200 tokens a turn, 50 of a tool, 2 s a tool call"
    batch = work.batch(512, seed=0)
    turns = [turn for one in batch for turn in one.turns]
    assert {
        "turns": len(turns) / 4096,
        "prompt_tokens": sum(one.prompt_tokens for one in batch) / 4096,
        "answer_tokens": sum(turn.gen_tokens for turn in turns) / len(turns),
        "observation_tokens": sum(turn.new_tokens for turn in turns) / (len(turns) - 4096),
        "tool_s": sum(turn.tool_s for turn in turns) / (len(turns) - 4096),
    } == pytest.approx(mean, rel=0.05)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (
            {"turns": 1, "answer_tokens": 6000},
            "1 turn, 6,000 tokens a turn; assumed: prompts of 1,024 tokens; say it in",
        ),
        (
            {"turns": 16},
            "16 turns; assumed: prompts of 1,024 tokens, 128 tokens a turn, 64 of a tool, 1 s a tool call;",
        ),
        ({"prompt_tokens": 16_000, "turns": 1}, "1 turn, prompts of 16,000 tokens; assumed: 384 tokens a turn; say it"),
    ],
)
def test_what_was_assumed_is_said(said: dict[str, float], words: str) -> None:
    assert work_of(16384, work=said).source.startswith(words)


def test_several_tasks_have_groups_by_weight_and_work_of_their_own(tmp_path: Path) -> None:
    write_trace(tmp_path / "trajectories.jsonl", [TrajectoryRecord("p", 0, 7, (TurnRecord(0, 50),))])
    parts = [
        {"name": "short", "data": "a", "weight": 3, "work": {"turns": 1, "answer_tokens": 10, "prompt_tokens": 5}},
        {"name": "as_said", "data": "b"},
        {"name": "seen", "data": "c", "work": {"trace": str(tmp_path)}},
    ]
    work = work_of(4096, train=parts, work={"turns": 1, "answer_tokens": 900, "prompt_tokens": 100})
    assert "as_said: 1 turn, prompts of 100 tokens, 900 tokens a turn; seen: 1 trajectories" in work.source
    batch = work.batch(10, 0)
    groups = [batch[begin].prompt_id for begin in range(0, len(batch), 8)]
    assert Counter("short" in one for one in dict.fromkeys(groups)) == {True: 6, False: 4}
    assert {one.generated for one in batch if "seen" in one.prompt_id} == {50}
