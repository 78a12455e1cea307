"""The policies of a simulation: every name, and the contract of `Policy` for those of the simulator alone."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libra_hpc.errors import UserError
from libra_hpc.policies.scheduling.baselines.least_loaded import Sticky
from libra_hpc.policies.scheduling.registry import SIMULATOR_ONLY, policy_names
from libra_hpc.simulator.abandon import Abandons, UnfinishedTrajectory
from libra_hpc.simulator.baselines.tail_batching import TailBatching
from libra_hpc.simulator.policies import make_simulated_policy, parse_policies, simulated_policy_names
from tests.policies.scheduling.boards import assert_nothing_is_kept, board_of, drive, ended, random_lengths

from .futures import foresight


@pytest.mark.parametrize("name", SIMULATOR_ONLY)
@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32))
def test_everything_is_served_and_only_open_engines_with_a_slot_are_chosen(name: str, seed: int) -> None:
    rng = random.Random(seed)
    lengths = random_lengths(rng, groups=rng.randint(1, 12))
    board = board_of(("a", 1), ("b", 1), ("c", 2), ("d", 4), cap=2)
    order = drive(make_simulated_policy(name, foresight(lengths)), board, lengths, rng)
    assert sorted(order) == sorted(lengths)


@pytest.mark.parametrize("name", SIMULATOR_ONLY)
def test_what_ended_is_forgotten(name: str) -> None:
    rng = random.Random(1)
    lengths = random_lengths(rng, groups=6)
    policy = make_simulated_policy(name, foresight(lengths))
    drive(policy, board_of(("a", 1), ("b", 4)), lengths, rng)
    assert_nothing_is_kept(policy)


def test_tail_batching_aborts_the_tail_once() -> None:
    policy = TailBatching()
    assert isinstance(policy, Abandons)
    assert not isinstance(Sticky(), Abandons)
    tail = [UnfinishedTrajectory(f"t{i}", f"p{i}", 0, 100 * i, 0) for i in range(2)]
    assert policy.abandon(tail, 7, 10, 5.0) == ()
    assert policy.abandon(tail, 8, 10, 6.0) == ["t0", "t1"], "8 of 10 are enough: 10 = 1.25 * 8"
    for t in tail:
        policy.forget(t.trajectory)
    later = UnfinishedTrajectory("t2", "p2", 0, 0, 1)
    assert policy.abandon([*tail, later], 8, 10, 9.0) == ["t2"], "the long round runs to its end"
    policy.finished(ended("t0", "p0", 500), 20.0)
    assert policy.abandon([tail[0]], 8, 10, 30.0) == ["t0"]


def test_names_and_mistakes() -> None:
    assert set(simulated_policy_names()) - set(policy_names()) == {"oracle", "tail_batching"}
    for name in simulated_policy_names():
        assert make_simulated_policy(name, foresight({})).name == name
    assert parse_policies("oracle, cmlfq,oracle") == ["oracle", "cmlfq"]
    with pytest.raises(
        UserError, match=r"^--policy = 'tail-batching': unknown policy; .*\(did you mean 'tail_batching'\?\)\.$"
    ):
        parse_policies("tail-batching")
