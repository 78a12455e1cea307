"""The description of a trace against values worked out by hand."""

from __future__ import annotations

import pytest

from libra_hpc.protocol.trace import TrajectoryRecord, TurnRecord
from libra_hpc.traces.describe import describe, quantile, spread, tail_share


def flat(prompt: str, sample: int, *turns: int, outcome: str | None = None) -> TrajectoryRecord:
    middle = [TurnRecord(10 if index else 0, tokens, "get", outcome, 1.0) for index, tokens in enumerate(turns[:-1])]
    return TrajectoryRecord(prompt, sample, 100, (*middle, TurnRecord(10 if len(turns) > 1 else 0, turns[-1])))


def test_quantiles() -> None:
    assert [quantile([1.0, 2.0, 4.0], share) for share in (0, 0.25, 0.5, 1)] == [1.0, 1.5, 2.0, 4.0]
    assert spread([]) is None


def test_the_tail() -> None:
    assert tail_share([1.0] * 9 + [91.0]) == pytest.approx(0.91)
    assert tail_share([3.0]) == 1.0


def test_a_description_counts() -> None:
    what = describe([flat("a", 0, 5, 7), flat("a", 1, 3), flat("b", 0, 2, 2, 2, outcome="ok")])
    assert (what.trajectories, what.prompts, what.groups, what.turns_total, what.generated_total) == (3, 2, 1, 6, 21)
    assert what.context.most == 100 + 6 + 20
    assert [(use.tool, use.calls, use.outcomes) for use in what.tools] == [("get", 3, {"ok": 2})]
    assert what.mean_reward is None
    assert what.payload is not None
    assert what.payload.mean == 10
