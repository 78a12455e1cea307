"""The statistics against values worked out by hand, and what predicts what on traces whose structure is known."""

from __future__ import annotations

import random

import pytest

from libra_hpc.protocol.trace import TrajectoryRecord, TurnRecord
from libra_hpc.traces.describe import describe, tail_share
from libra_hpc.traces.generate import Dials, generate
from libra_hpc.traces.predict import FEW, predict
from libra_hpc.traces.trace_stats import centred, one_way, pearson, quantile, spread


def flat(prompt: str, sample: int, *turns: int, outcome: str | None = None) -> TrajectoryRecord:
    middle = [TurnRecord(10 if index else 0, tokens, "get", outcome, 1.0) for index, tokens in enumerate(turns[:-1])]
    return TrajectoryRecord(prompt, sample, 100, (*middle, TurnRecord(10 if len(turns) > 1 else 0, turns[-1])))


def test_quantiles_and_correlation() -> None:
    assert [quantile([1.0, 2.0, 4.0], share) for share in (0, 0.25, 0.5, 1)] == [1.0, 1.5, 2.0, 4.0]
    assert spread([]) is None
    assert pearson([(1, 2), (2, 4), (3, 6)]) == pytest.approx(1)
    assert pearson([(1, 1), (2, 3), (3, 2)]) == pytest.approx(0.5)
    assert pearson([(1, 1), (1, 2), (1, 3)]) is None
    assert pearson([(1, 1), (2, 2)]) is None
    assert centred([("a", 1, 10), ("a", 3, 20), ("b", 100, 0)]) == [(-1, -5), (1, 5), (0, 0)]


def test_one_way_analysis_of_variance() -> None:
    # Groups (1, 3) and (5, 7): between = 16 (1 df), within = 4 (2 df, mean 2), so ICC = (16 - 2) / (16 + 2).
    rows = [(0, "a", 1), (0, "a", 3), (0, "b", 5), (0, "b", 7)]
    found = one_way(rows)
    assert found is not None
    assert [found.eta2, found.epsilon2, found.icc] == pytest.approx([0.8, 14 / 20, 14 / 18])
    # A difference between strata is none between groups.
    shifted = one_way(rows + [(1, group, 100 + value) for _, group, value in rows])
    assert shifted is not None
    assert shifted.eta2 == pytest.approx(0.8)
    assert one_way([(0, "a", 1), (0, "a", 2)]) is None
    assert one_way([(0, "a", 1), (0, "b", 2)]) is None


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


def test_missing_siblings_and_outcomes_are_reported() -> None:
    rng = random.Random(0)
    lone = [flat(str(index), 0, *(rng.randint(1, 50) for _ in range(3))) for index in range(50)]
    found = predict(lone)
    assert found.prompt == []
    first = found.signals[0]
    assert (first.signal, first.value, first.note) == ("last outcome", None, "no outcomes")
    constant = predict([flat(str(index), 0, 1, 2, 3, outcome="ok") for index in range(50)])
    assert constant.signals[0].note == "every outcome is 'ok'"
    single = predict([flat(str(index), 0, index + 1) for index in range(50)])
    assert {signal.n for signal in single.signals} == {0}
    assert predict([flat("a", 0, 5)]).trend == "too few"


def test_turns_that_few_reach_are_left_out() -> None:
    trace = [flat(str(index), 0, 1, 2) for index in range(FEW)] + [flat("long", 0, *range(1, 100))]
    assert next(signal.n for signal in predict(trace).signals if signal.signal == "log attained") == FEW + 1


def test_residual_work_rises_for_a_heavy_tail_and_falls_for_equal_lengths() -> None:
    heavy = predict(generate("math", Dials(sibling=0.0)))
    assert heavy.trend == "rises"
    assert heavy.residual[0].n == 512
    assert heavy.residual[-1].mean_tokens > 2 * heavy.residual[0].mean_tokens
    rng = random.Random(0)
    equal = predict([flat(str(index), 0, rng.randint(900, 1100)) for index in range(200)])
    assert equal.trend == "falls"
    memoryless = predict([flat(str(index), 0, 1 + int(rng.expovariate(1 / 1000))) for index in range(5000)])
    assert memoryless.trend == "flat"


def test_residuals_by_hand() -> None:
    trace = [flat(str(index), 0, 10, 20) for index in range(20)] + [flat(str(index), 1, 10, 10) for index in range(20)]
    found = predict(trace)
    assert [(row.attained, row.n, row.mean_tokens) for row in found.residual] == [(0, 40, 25.0), (20, 20, 10.0)]
    assert found.residual[1].mean_turns == 0.5


def test_a_prompt_that_decides_everything() -> None:
    trace = [flat(str(prompt), sample, *([10] * (prompt + 1))) for prompt in range(8) for sample in range(4)]
    row = next(row for row in predict(trace).prompt if row.quantity == "turns")
    assert (row.groups, row.n, row.anova.eta2, row.anova.icc) == (8, 32, 1.0, 1.0)
    assert row.r_siblings == pytest.approx(1)
    assert row.r_probe == pytest.approx(1)
