"""The description of a trace against values worked out by hand."""

from __future__ import annotations

import pytest

from libra_hpc.protocol.trace import TrajectoryRecord, TurnRecord
from libra_hpc.traces.describe import describe, tail_share


def flat(prompt: str, sample: int, *turns: int, outcome: str | None = None) -> TrajectoryRecord:
    middle = [TurnRecord(10 if index else 0, tokens, "get", outcome, 1.0) for index, tokens in enumerate(turns[:-1])]
    return TrajectoryRecord(prompt, sample, 100, (*middle, TurnRecord(10 if len(turns) > 1 else 0, turns[-1])))


def test_a_description_counts() -> None:
    what = describe([flat("a", 0, 5, 7), flat("a", 1, 3), flat("b", 0, 2, 2, 2, outcome="ok")])
    assert (what.trajectories, what.prompts, what.groups, what.turns, what.generated) == (3, 2, 1, 6, 21)
    assert what.spreads["context at the end"].most == 100 + 6 + 20
    assert {tool: (use.calls, use.outcomes) for tool, use in what.tools.items()} == {"get": (3, {"ok": 2})}
    assert what.mean_reward is None
    assert what.spreads["tokens a tool returns"].mean == 10
    assert what.spreads["generated tokens of a turn"].p90 == 6.0
    assert list(describe([flat("a", 0, 5)]).spreads)[-1] == "context at the end"


def test_the_tail() -> None:
    assert tail_share([1.0] * 9 + [91.0]) == pytest.approx(0.91)
    assert tail_share([3.0]) == 1.0
