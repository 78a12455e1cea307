"""Properties of generated traces: tails, dials, cuts, and the same trace for the same seed."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from typing import Any

import pytest

from libra_hpc.errors import UserError
from libra_hpc.traces.describe import describe, tail_share
from libra_hpc.traces.generate import Dials, generate
from libra_hpc.traces.profiles import PROFILES
from libra_hpc.traces.record import trajectory

DECODE_S = 1 / 50
"""Seconds a token in the test of rollout time."""


def shares(outcome: float) -> tuple[float, float]:
    """Shares of the variance of the log of what remains that a failed call, and failed tests, explain."""
    calls, tests = [], []
    for one in generate("r2e", Dials(outcome=outcome)):
        left = one.generated
        for turn in one.turns[:-1]:
            left -= turn.gen_tokens
            calls.append((float(turn.outcome != "ok"), math.log(left)))
            if turn.failed is not None:
                tests.append((float(turn.failed), math.log(left)))
    return tuple(statistics.correlation(*zip(*rows, strict=True)) ** 2 for rows in (calls, tests))


@pytest.mark.parametrize("preset", PROFILES)
def test_every_trajectory_has_the_invariants_of_the_readers(preset: str) -> None:
    dials = Dials(trajectories=128, seed=3)
    made = generate(preset, dials)
    assert len(made) == 128
    assert Counter(one.prompt_id for one in made) == {f"{preset}/{prompt}": 8 for prompt in range(16)}
    for one in made:
        assert trajectory(one.prompt_id, one.sample, one.prompt_tokens, one.turns, one.reward) == one
        assert one.context <= dials.max_context
        for turn, following in zip(one.turns, one.turns[1:], strict=False):
            assert turn.tool is not None
            assert turn.outcome in ("ok", "error", "timeout")
            assert following.new_tokens >= 1
            assert (turn.exit_code == 0) == (turn.outcome == "ok")
            if turn.failed is not None and turn.passed is not None:
                assert turn.passed + turn.failed == 20
                assert (turn.failed > 0) == (turn.outcome == "error")


def test_the_seed_decides_the_trace() -> None:
    assert generate("r2e", Dials(seed=1)) == generate("r2e", Dials(seed=1))
    assert generate("r2e", Dials(seed=1)) != generate("r2e", Dials(seed=2))


def test_the_outcome_dial_changes_outcomes_only() -> None:
    def without(outcome: float) -> list[Any]:
        same = ("new_tokens", "gen_tokens", "tool", "tool_s")
        made = generate("r2e", Dials(outcome=outcome))
        turns = [[[getattr(turn, name) for name in same] for turn in one.turns] for one in made]
        return [[(one.prompt_tokens, one.reward) for one in made], turns]

    assert without(0.0) == without(1.0)


@pytest.mark.parametrize("seed", range(5))
def test_the_longest_tenth_is_more_than_half_of_the_rollout_time(seed: int) -> None:
    made = generate("r2e", Dials(seed=seed))
    assert tail_share(sorted(one.generated for one in made)) > 0.5
    assert tail_share(sorted(one.generated * DECODE_S + sum(turn.tool_s for turn in one.turns) for one in made)) > 0.5


def test_r2e_has_the_measured_statistics_of_coding_agents() -> None:
    what = describe(generate("r2e", Dials(trajectories=2048)))
    uses, payload = what.tools.values(), what.spreads["tokens a tool returns"]
    for least, found, most in (
        (17, what.spreads["turns"].mean, 22),
        (0.03, what.spreads["seconds of a tool call"].p50, 0.06),
        (350, payload.p50, 480),
        (1300, payload.p90, 1600),
        (0.13, sum(use.outcomes.get("error", 0) for use in uses) / sum(use.calls for use in uses), 0.2),
    ):
        assert least < found < most
    assert what.tools["test"].seconds.p50 > 100 * what.tools["read"].seconds.p50


@pytest.mark.parametrize("sibling", [0.0, 0.3, 0.69, 1.0])
def test_the_sibling_dial_is_the_share_the_prompt_explains(sibling: float) -> None:
    made = generate("math", Dials(sibling=sibling))
    logs = [[math.log(one.generated) for one in made[start : start + 8]] for start in range(0, len(made), 8)]
    pairs = [(first, other) for first, *others in logs for other in others]
    assert statistics.correlation(*zip(*pairs, strict=True)) == pytest.approx(sibling, abs=0.12)


def test_the_outcome_dial_sets_how_well_outcomes_predict() -> None:
    (nothing, no_test), (little, few_tests), (much, tests), (most, all_tests) = map(shares, (0.0, 0.2, 0.7, 1.0))
    assert nothing < 0.02
    assert no_test < 0.02
    assert few_tests < 0.1
    assert little < much < most
    assert 0.2 < tests < all_tests
    assert all_tests > 0.5


def test_at_full_dial_a_test_run_determines_what_remains() -> None:
    runs = [
        (sum(later.gen_tokens for later in one.turns[i + 1 :]), turn.failed)
        for one in generate("r2e", Dials(outcome=1.0))
        # A cut trajectory lost some of the work that its outcomes predicted.
        if one.context < 100_000
        for i, turn in enumerate(one.turns)
        if turn.failed is not None
    ]
    assert [failed for _, failed in sorted(runs)] == sorted(failed for _, failed in runs)


def test_drift_changes_the_typical_length_along_the_trace() -> None:
    def ratio(drift: float) -> float:
        logs = [math.log(one.generated) for one in generate("math", Dials(trajectories=4096, drift=drift, sibling=0.0))]
        first, last = logs[:1024], logs[-1024:]
        return math.exp((sum(last) - sum(first)) / 1024)

    assert ratio(1.0) == pytest.approx(1.0, rel=0.2)
    # Quarters at the ends: their middles are three quarters of the way apart.
    assert ratio(8.0) == pytest.approx(8.0**0.75, rel=0.2)


def test_a_trajectory_is_cut_where_the_context_ends() -> None:
    whole, cut = (generate("r2e", Dials(max_context=tokens)) for tokens in (10**9, 20_000))
    shortened = [after for before, after in zip(whole, cut, strict=True) if before.context > 20_000]
    assert len(shortened) > 50
    assert all(one.context <= 20_000 and one.turns[-1].tool is None for one in shortened)


MISTAKES: list[tuple[str, Dials, str]] = [
    ("r2d", Dials(), "preset = 'r2d': unknown preset; valid: r2e, search, math, documents (did you mean 'r2e'?)."),
    ("r2e", Dials(trajectories=100), "trajectories = 100: not a whole number of groups; valid: a multiple of group"),
    ("r2e", Dials(trajectories=0), "trajectories = 0: out of range"),
    ("r2e", Dials(sibling=1.5), "sibling = 1.5: out of range; valid: a number from 0 to 1."),
    ("r2e", Dials(outcome=math.nan), "outcome = nan: out of range"),
    ("r2e", Dials(drift=0), "drift = 0: out of range"),
    ("r2e", Dials(max_context=4000), "the longest prompt leaves no room for an answer; valid: an integer >= 8001."),
]


@pytest.mark.parametrize(("preset", "dials", "sentence"), MISTAKES)
def test_a_dial_out_of_range(preset: str, dials: Dials, sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        generate(preset, dials)
    assert sentence in str(caught.value)
