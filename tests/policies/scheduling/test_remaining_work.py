"""Signals, survival tables, groups, signal effects, and the estimator built from them."""

from __future__ import annotations

import random
from typing import Any

import pytest

from libra_hpc.policies.scheduling.cmlfq.blend import PRIOR, SOLVE_EVERY, Blend
from libra_hpc.policies.scheduling.cmlfq.remaining_work import RemainingWorkEstimator
from libra_hpc.policies.scheduling.cmlfq.signal_effect import TRIALS, Gate, SignalEffect
from libra_hpc.policies.scheduling.cmlfq.signals import MAX_SYMBOLS, SignalState, Vocabulary
from libra_hpc.policies.scheduling.cmlfq.survival import PRIOR_TOKENS, Survival, cell_of
from libra_hpc.protocol.env import Signal

from .boards import OK, finished


def read(*signals: Signal) -> list[tuple[str, str]]:
    state = SignalState()
    return [state.read(s)[1:3] for s in signals]


def signal(outcome: str = "ok", tool: str = "run", **more: Any) -> Signal:
    return Signal(tool, **{"outcome": outcome, "payload_tokens": 5, "seconds": 0.1, **more})


@pytest.mark.parametrize(
    ("seen", "outcome"),
    [
        (signal("ok", exit_code=1), "error"),
        (signal("ok", exit_code=0), "ok"),
        (signal("timeout", exit_code=124), "timeout"),
        (signal("ok", tool="0 errors"), "ok"),
    ],
)
def test_outcomes_come_from_exit_codes_not_text(seen: Signal, outcome: str) -> None:
    assert read(seen) == [(outcome, "")]


def test_test_counts_become_classes_with_their_trend() -> None:
    runs = [signal(passed=p, failed=f) for p, f in ((0, 5), (2, 3), (2, 3), (5, 0))]
    assert [tests for _, tests in read(*runs)] == ["none", "some-", "some=", "all"]


def test_payload_and_repeat_classes() -> None:
    state = SignalState()
    assert [state.read(signal(payload_tokens=n))[3] for n in (128, 129, 1024, 1025)] == [0, 1, 1, 2]
    state = SignalState()
    assert [state.read(OK)[4] for _ in range(4)] == [0, 1, 2, 2]


def test_the_vocabulary_is_bounded() -> None:
    words = Vocabulary()
    numbers = [words.number((f"t{i}", "ok", "", 0, 0)) for i in range(MAX_SYMBOLS + 5)]
    assert numbers[:3] == [1, 2, 3]
    assert numbers[-5:] == [0] * 5
    assert words.number(("t1", "ok", "", 0, 0)) == 2


def test_survival_starts_with_a_heavy_tail() -> None:
    table = Survival()
    for tokens in (1000, 8000, 64_000):
        assert table.rest[cell_of(tokens)] == pytest.approx(tokens, rel=0.35), "as long again"
    assert PRIOR_TOKENS / 2 < table.rest[0] < 4 * PRIOR_TOKENS


def finish(table: Survival, tokens: int, count: int = 1) -> None:
    for _ in range(count):
        table.passed(0, cell_of(tokens))
        table.ended(cell_of(tokens), 0)


def test_survival_recovers_an_exponential() -> None:
    rng, table = random.Random(0), Survival()
    for _ in range(4000):
        finish(table, rng.expovariate(1 / 3000))
    for attained in (100, 1000, 5000):
        assert table.rest[cell_of(attained)] == pytest.approx(3000, rel=0.2)


def test_running_trajectories_count() -> None:
    cold, aware = Survival(), Survival()
    for table in (cold, aware):
        finish(table, 300, 20)
    for _ in range(200):
        aware.passed(0, cell_of(5000))
    for _ in range(16):
        aware.ended(cell_of(300), 0)
    assert aware.rest[0] > 5 * cold.rest[0]


def test_a_signal_effect_is_the_mean_residual_shrunk_by_evidence() -> None:
    node = SignalEffect()
    node.learn(1.0, 0)
    assert node.effect == pytest.approx(1.0 / 9.0), "one value of weight 1 / (1 + 8)"
    for _ in range(79):
        node.learn(1.0, 0)
    assert node.effect == pytest.approx(80.0 / 88.0)
    node.learn(-1.0, 16)
    assert node.count == pytest.approx(41.0), "evidence halves in 16 versions"


def test_a_blend_finds_the_weights_behind_the_data() -> None:
    rng, blend = random.Random(2), Blend()
    true = (0.3, -0.8, 0.5, -1.0, 0.4, 0.7, 0.9)
    for _ in range(3000):
        failed = rng.choice((None, 0, 3, 12))
        tests = (0.0, 0.0, 0.0) if failed is None else (0.0, 1.0, float(failed)) if failed else (1.0, 0.0, 0.0)
        x = [1.0, rng.gauss(0, 1), rng.gauss(0, 0.5), *tests, rng.gauss(0, 1)]
        target = sum(w * v for w, v in zip(true, x, strict=True)) + rng.gauss(0, 1.0)
        blend.learn(x, target, target - blend.predict(x), 1.0)
    assert blend.weights == pytest.approx(true, abs=0.15)
    # The mean of exp of a standard normal is exp(1 / 2); the robust ratio stays below.
    assert 0.0 < blend.log_smear < 0.55


def test_a_blend_stays_with_its_prior_until_data_move_it() -> None:
    blend = Blend()
    assert blend.weights == list(PRIOR)
    for i in range(SOLVE_EVERY):
        blend.learn([1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0], 1.0, 1.0 - blend.weights[0], 1.0)
        assert 0.0 <= blend.weights[0] <= 1.0, i
    assert blend.weights[0] == pytest.approx(SOLVE_EVERY / (SOLVE_EVERY + 20.0), rel=0.05)
    assert blend.weights[1:] == pytest.approx(PRIOR[1:])


def test_quantile_offsets_follow_the_errors() -> None:
    rng, blend = random.Random(4), Blend()
    for _ in range(5000):
        blend.loss(rng.gauss(0.0, 1.0))
    assert blend.p50 == pytest.approx(0.0, abs=0.3)
    assert blend.p90 == pytest.approx(1.28, abs=0.4)


def test_early_ends_are_weighted_against_those_that_still_run() -> None:
    table, done = Survival(), Survival()
    for _ in range(100):
        table.passed(0, cell_of(3000))
    finish(table, 300, 48)
    for _ in range(16):
        table.ended(cell_of(3000), 0)
    short, long = table.weight[cell_of(300)], table.weight[cell_of(3000)]
    assert long > 1.2 * short, "of those who reached 3,000 tokens most still run"
    finish(done, 300, 64)
    assert done.weight[cell_of(300)] == pytest.approx(1.0, abs=0.1)


def test_a_gate_stays_shut_before_enough_trials_and_shuts_again() -> None:
    gate = Gate()
    for i in range(TRIALS):
        assert not gate.open, i
        gate.learn(0.5, 1.0)
    assert gate.open
    for _ in range(60):
        gate.learn(2.0, 1.0)
    assert not gate.open


def trained(useful: bool, groups: int = 60, seed: int = 0) -> RemainingWorkEstimator:
    """Two kinds of prompts, 400 and 6,000 tokens; ``useful``: kinds belong to prompts, else to nothing."""
    rng, estimator = random.Random(seed), RemainingWorkEstimator()
    for g in range(groups):
        for k in range(8):
            long = g % 2 == 0 if useful else rng.random() < 0.5
            total = int((6000 if long else 400) * rng.lognormvariate(0.0, 0.2))
            estimator.insert(finished(total, f"p{g}", f"t{g}-{k}"))
    return estimator


def left(
    estimator: RemainingWorkEstimator, prompt: str, attained: int = 0, *signals: Signal, task: str = "task"
) -> float:
    return estimator.advance(estimator.cursor(prompt, task), signals, attained)


def test_siblings_decide_where_prompts_matter_and_are_ignored_where_they_do_not() -> None:
    estimator = trained(useful=True)
    assert left(estimator, "p0") > 5 * left(estimator, "p1")
    assert estimator.everything.k <= 2.0
    noise = trained(useful=False)
    assert noise.everything.k >= 8.0
    assert 0.5 < left(noise, "p0") / left(noise, "p1") < 2.0


def test_a_running_sibling_that_outlives_the_others_lengthens_its_group_until_it_is_aborted() -> None:
    estimator = trained(useful=True)
    before, cursor = left(estimator, "new"), estimator.cursor("new", "task")
    estimator.advance(cursor, (), 20_000)
    assert left(estimator, "new") > before > 0.0
    aborted = estimator.cursor("other", "task")
    estimator.advance(aborted, (), 20_000)
    estimator.drop(aborted)
    assert estimator.cursor("other", "task").prompt.gap() == (0.0, 0.0)


def outcomes(informative: bool, seed: int = 3) -> RemainingWorkEstimator:
    rng, estimator = random.Random(seed), RemainingWorkEstimator()
    for i in range(600):
        long = rng.random() < 0.5
        failed = long if informative else rng.random() < 0.5
        total = 200 + int((5000 if long else 200) * rng.lognormvariate(0.0, 0.3))
        outcome = signal("error" if failed else "ok")
        estimator.insert(finished(total, f"p{i}", f"t{i}", signals=(outcome,), at=(200,)))
    return estimator


def test_signals_move_the_estimate_where_they_inform_and_not_where_they_do_not() -> None:
    good, bad = (signal(o) for o in ("ok", "error"))
    estimator = outcomes(True)
    assert left(estimator, "new", 200, bad) > 2.0 * left(estimator, "new", 200, good)
    noise = outcomes(False)
    assert left(noise, "new", 200, bad) < 1.6 * left(noise, "new", 200, good)
    assert estimator.everything.gate.open
    assert not noise.everything.gate.open


def test_a_cursor_equals_a_walk_from_the_start() -> None:
    estimator = outcomes(True)
    signals = tuple(signal(o) for o in ("ok", "error", "error", "ok"))
    stepwise = estimator.cursor("new", "task")
    for i in range(1, 5):
        estimator.advance(stepwise, signals[:i], 100 * i)
    assert stepwise.left == pytest.approx(left(outcomes(True), "new", 400, *signals))


def test_evidence_halves_with_weight_versions() -> None:
    estimator = RemainingWorkEstimator()
    for i in range(4):
        estimator.insert(finished(500, "p", f"t{i}"))
    assert estimator.cursor("p", "task").prompt.finished == pytest.approx(4.0)
    estimator.insert(finished(500, "p", "later", version=16))
    assert estimator.cursor("p", "task").prompt.finished == pytest.approx(3.0)


def test_prompts_and_effects_are_bounded() -> None:
    estimator, rng = RemainingWorkEstimator(max_prompts=20), random.Random(0)
    for i in range(300):
        signals = tuple(signal(tool=f"tool{rng.randrange(20)}") for _ in range(8))
        estimator.insert(finished(900, f"p{i}", f"t{i}", signals=signals, at=tuple(range(100, 900, 100))))
    assert len(estimator) <= 20 + 20 * 3


def test_a_second_task_starts_from_all_tasks_then_separates() -> None:
    estimator = RemainingWorkEstimator()
    for i in range(100):
        estimator.insert(finished(4000, f"a{i}", f"t{i}", task="long"))
    start = left(estimator, "b0", task="short")
    assert start == pytest.approx(left(estimator, "x", task="long"), rel=0.2)
    for i in range(100):
        estimator.insert(finished(100, f"b{i}", f"s{i}", task="short"))
    assert left(estimator, "new", task="short") < start / 5
    assert left(estimator, "new2", task="long") > start / 2
