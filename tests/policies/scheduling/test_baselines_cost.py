"""Rules that price engines: load per GPU, and Libra's later cost rule."""

from __future__ import annotations

import pytest

from libra_hpc.policies.scheduling.baselines.cmlfq_cost import CmlfqCost
from libra_hpc.policies.scheduling.baselines.tp_sticky import TpSticky

from .boards import OK, board_of, ended, turn_of


def test_tp_sticky_fills_engines_in_proportion_to_their_gpus() -> None:
    policy, board = TpSticky(), board_of(("small", 1), ("large", 4), cap=99)
    chosen = [policy.route(turn_of(f"t{number}"), board, 0.0).engine for number in range(10)]
    assert chosen.count("large") == 8
    assert policy.route(turn_of("t0", at=chosen[0], turns=1), board, 1.0).engine == chosen[0]


def test_tp_sticky_counts_trajectories_in_tools_or_only_turns_in_flight() -> None:
    board = board_of(("a", 1), ("b", 1))
    by_life, by_turns = TpSticky(), TpSticky(live=False)
    assert [p.route(turn_of("s"), board, 0.0).engine for p in (by_life, by_turns)] == ["a", "a"]
    assert [p.route(turn_of("t"), board, 0.0).engine for p in (by_life, by_turns)] == ["b", "a"]


def test_cmlfq_cost_weighs_decoding_against_the_prefill_of_a_move() -> None:
    policy, board = CmlfqCost(), board_of(("small", 1), ("large", 8))
    for number in range(4):
        policy.finished(ended(f"old{number}", "p", 5_000, signals=(OK,), at=(100,)), 0.0)
    long = policy.route(turn_of("t", at="small", turns=1, context=2_000, signals=(OK,)), board, 0.0)
    assert long.engine == "large", "4,900 tokens are worth a prefill of 2,000"
    for number in range(4):
        policy.finished(ended(f"short{number}", "q", 110, signals=(OK,), at=(100,)), 0.0)
    short = policy.route(turn_of("u", "q", at="small", turns=1, context=50_000, signals=(OK,)), board, 0.0)
    assert short.engine == "small", "10 tokens are not worth a prefill of 50,000"


def test_cmlfq_cost_starts_small_without_samples_and_respects_the_limit() -> None:
    policy, board = CmlfqCost(max_queue_length=1), board_of(("small", 1), ("large", 8))
    assert policy.route(turn_of("s"), board, 0.0).engine == "small"
    policy.finished(ended("old", "p", 9_000, signals=(OK,), at=(100,)), 0.0)
    assert [policy.route(turn_of(name), board, 0.0).engine for name in "tu"] == ["large", "small"]


def test_cmlfq_cost_bins_the_samples_by_threshold() -> None:
    policy = CmlfqCost(thresholds=(100, 1_000))
    for name, total in (("a", 50), ("b", 70), ("c", 5_000)):
        policy.finished(ended(name, "p", total, signals=(OK,), at=(0,)), 0.0)
    bins = policy.bins(policy.tree.look_up("p", ()))
    assert [share for share, _ in bins] == pytest.approx([2 / 3, 1 / 3])
    assert [mean for _, mean in bins] == pytest.approx([60.0, 5_000.0])
