"""The pool's state machine: the paths of a node, and what no sequence of events can break."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libra_hpc.policies.pool.states import (
    Event,
    IllegalTransition,
    MemberOf,
    MoveOrdered,
    NodeState,
    Pool,
    RankBack,
    RankLost,
    StateArrived,
    advance,
    rollout_nodes,
    start,
    trainers,
)
from libra_hpc.protocol.agents import TurnsDrained
from libra_hpc.protocol.engine_state import EngineState
from libra_hpc.protocol.layout import Layout

from . import layout_orders as orders_of
from .layout_orders import DrainTurns, FormGeneration, StandbyEngine, StartEngine, StopTrainers, layout_of


def ready(rank: int, kind: str) -> EngineState:
    return EngineState(rank, kind, "ready")  # type: ignore[arg-type]


def lost(rank: int, kind: str, world: int = 0) -> EngineState:
    return EngineState(rank, kind, "lost", world=world)  # type: ignore[arg-type]


def play(pool: Pool, *events: Event) -> tuple[Pool, list[Any]]:
    """The pool after ``events``, and what nodes and leaders find in their rows, less who was lost and is back."""
    found: list[Any] = []
    for event in events:
        before, pool = pool, advance(pool, event)
        found += orders(before, pool, event)
    return pool, found


def orders(before: Pool, pool: Pool, event: Event) -> list[Any]:
    trainers_ended = isinstance(event, EngineState) and (event.kind, event.state) == ("train", "lost")
    found = orders_of.orders(layout_of(before), layout_of(pool), [event.rank] if trainers_ended else [])
    return [order for order in found if not isinstance(order, orders_of.RankLost | orders_of.RankBack)]


def after(pool: Pool, *events: Event, does: list[Any] | None = None) -> Pool:
    """The pool after ``events``, which ask for ``does``."""
    pool, found = play(pool, *events)
    assert does is None or sorted(map(repr, found)) == sorted(map(repr, does))
    return pool


def running(hybrid: str = "rollout") -> Pool:
    """Nodes 1 (train), 2 (rollout), 3 (hybrid), all at work."""
    pool = start([(1, "train"), (2, "rollout"), (3, "hybrid")], "train" if hybrid == "train" else "rollout")
    pool = after(pool, ready(1, "train"), MemberOf(1, 1), StateArrived(1), ready(2, "rollout"), ready(3, hybrid))
    return pool if hybrid == "rollout" else after(pool, StateArrived(3), MemberOf(1, 2), MemberOf(3, 2))


def states(pool: Pool) -> list[str]:
    return [str(node.state) for node in pool.nodes.values()]


def test_start_brings_every_node_to_its_stage() -> None:
    pool = start([(1, "train"), (2, "rollout"), (3, "hybrid")])
    effects = orders_of.orders(Layout(), layout_of(pool))
    assert effects == [StartEngine(1, "train"), StartEngine(2, "rollout"), StartEngine(3, "rollout")]
    assert states(running()) == ["train", "rollout", "rollout"]
    assert states(running("train")) == ["train", "rollout", "train"]


def test_a_generation_waits_for_all_nodes_of_the_core() -> None:
    pool = start([(1, "train"), (2, "train"), (3, "rollout")])
    pool = after(pool, ready(2, "train"), does=[])
    pool = after(pool, ready(1, "train"), does=[FormGeneration(1, (1, 2))])
    pool = after(pool, lost(2, "train"), does=[StartEngine(2, "train")])
    assert pool.forming is None, "the rest of the core has only a part of the state"


def test_to_train_and_it_counts_only_with_its_state() -> None:
    pool = after(running(), MoveOrdered(3, "train"), does=[DrainTurns(3)])
    pool = after(pool, TurnsDrained(3), does=[StandbyEngine(3, "rollout"), StartEngine(3, "train")])
    assert trainers(pool) == (1,)
    assert pool.forming is None, "nobody waits for an engine that starts"
    pool = after(pool, ready(3, "train"), does=[FormGeneration(2, (1, 3))])
    pool = after(pool, MemberOf(1, 2), MemberOf(3, 2))
    assert (pool.membership.ranks, trainers(pool)) == ((1, 3), (1,))
    pool = after(pool, StateArrived(3))
    assert trainers(pool) == (1, 3)
    assert states(pool) == ["train", "rollout", "train"]


def test_to_rollout_leaves_with_the_next_generation() -> None:
    pool = after(running("train"), MoveOrdered(3, "rollout"), does=[FormGeneration(3, (1,))])
    assert trainers(pool) == (1, 3), "it works until the step boundary"
    pool = after(pool, MemberOf(1, 3), does=[StandbyEngine(3, "train"), StartEngine(3, "rollout")])
    assert trainers(pool) == (1,)
    pool = after(pool, ready(3, "rollout"), does=[])
    assert rollout_nodes(pool) == (2, 3)


def test_a_killed_replica_is_left_out_and_comes_back_as_a_new_member() -> None:
    pool = after(running("train"), lost(3, "train"), does=[FormGeneration(3, (1,)), StartEngine(3, "train")])
    assert trainers(pool) == (1,)
    pool = after(pool, ready(3, "train"), MemberOf(1, 3), does=[FormGeneration(4, (1, 3))])
    assert pool.membership.generation == 2, "the confirmation of the superseded generation 3 came late"
    pool = after(pool, StateArrived(3))
    assert trainers(pool) == (1,), "generation 2 holds its rank, but its new engine is in no group yet"
    pool = after(pool, MemberOf(1, 4), MemberOf(3, 4))
    assert trainers(pool) == (1, 3)


def test_the_core_dies_and_the_others_wait_until_it_is_rebuilt() -> None:
    pool = after(running("train"), lost(1, "train"), does=[StartEngine(1, "train")])
    assert trainers(pool) == (3,)
    pool = after(pool, ready(1, "train"), does=[FormGeneration(3, (1, 3))])
    arrived = [event for rank in (1, 3) for event in (StateArrived(rank), MemberOf(rank, 3))]
    assert trainers(play(pool, *arrived)[0]) == (1, 3)


def test_a_node_leaves_training_also_while_the_core_is_rebuilt() -> None:
    pool = after(running("train"), lost(1, "train"), MoveOrdered(3, "rollout"), does=[StartEngine(1, "train")])
    does = [FormGeneration(3, (1,)), StandbyEngine(3, "train"), StartEngine(3, "rollout")]
    after(pool, ready(1, "train"), MemberOf(1, 3), does=does)


def test_a_rollout_engine_that_died_is_drained_and_started_again() -> None:
    pool = after(running(), lost(2, "rollout"), does=[StartEngine(2, "rollout")])
    assert rollout_nodes(pool) == (3,)
    others = [StandbyEngine(3, "rollout"), StartEngine(3, "train")]
    after(running(), MoveOrdered(3, "train"), lost(3, "rollout"), does=[DrainTurns(3), *others])


def test_a_lost_node_returns_to_its_role() -> None:
    pool = after(running("train"), RankLost(3), does=[FormGeneration(3, (1,))])
    pool = after(pool, RankLost(3), RankBack(3), does=[StartEngine(3, "train")])
    assert rollout_nodes(after(pool, RankLost(2), does=[])) == ()


def test_a_standby_that_dies_changes_nothing() -> None:
    pool = running()
    assert advance(pool, lost(3, "train")) == pool
    pool, effects = play(running("train"), MoveOrdered(3, "rollout"), lost(3, "train"))
    assert effects[-1] == StartEngine(3, "rollout")
    assert trainers(after(pool, MemberOf(1, 3), does=[])) == (1,), "already freed"


@pytest.mark.parametrize(
    "event",
    [
        MoveOrdered(1, "rollout"),
        MoveOrdered(2, "train"),
        MoveOrdered(3, "rollout"),
        MoveOrdered(9, "train"),
        TurnsDrained(3),
        ready(3, "rollout"),
        ready(3, "train"),
        StateArrived(3),
        StateArrived(2),
        MemberOf(1, 7),
        RankBack(3),
    ],
)
def test_impossible_events_raise(event: Event) -> None:
    with pytest.raises(IllegalTransition):
        advance(running(), event)


def test_the_last_rollout_node_may_not_leave() -> None:
    alone = after(running(), RankLost(2))
    with pytest.raises(IllegalTransition, match="last rollout node"):
        advance(alone, MoveOrdered(3, "train"))


def together() -> Pool:
    """Nodes 3 and 4 train as one world beside node 1; 2 and 5 roll out."""
    components = [(1, "train"), (2, "rollout"), (3, "hybrid"), (4, "hybrid"), (5, "rollout")]
    pool = start(components, unit=lambda rank: (3, 4) if rank in (3, 4) else (rank,))  # type: ignore[arg-type]
    pool = after(pool, ready(1, "train"), MemberOf(1, 1), StateArrived(1))
    pool = after(pool, *(ready(rank, "rollout") for rank in (2, 3, 4, 5)))
    pool = after(pool, MoveOrdered(4, "train"), does=[DrainTurns(3), DrainTurns(4)])
    pool = after(pool, TurnsDrained(3), TurnsDrained(4), ready(4, "train"))
    assert pool.forming is None, "half a replica does not train"
    pool = after(pool, ready(3, "train"), *(MemberOf(rank, 2) for rank in (1, 3, 4)))
    pool = after(pool, StateArrived(3), StateArrived(4))
    assert trainers(pool) == (1, 3, 4)
    return pool


def test_nodes_that_are_one_replica_move_together() -> None:
    pool = after(together(), MoveOrdered(3, "rollout"), does=[FormGeneration(3, (1,))])
    pool, effects = play(pool, MemberOf(1, 3), ready(3, "rollout"), ready(4, "rollout"))
    assert [e for e in effects if isinstance(e, StandbyEngine)] == [StandbyEngine(rank, "train") for rank in (3, 4)]
    assert rollout_nodes(pool) == (2, 3, 4, 5)


def test_a_process_that_ends_takes_its_whole_replica_down_and_both_nodes_begin_anew() -> None:
    pool = after(
        together(),
        lost(3, "train"),
        does=[FormGeneration(3, (1,)), StartEngine(3, "train", 1), StopTrainers(4), StartEngine(4, "train", 1)],
    )
    # What the other node says of the same death.
    assert play(pool, lost(4, "train", 0)) == (pool, [])
    after(pool, lost(4, "train", 1), does=[StopTrainers(3), StartEngine(3, "train", 2), StartEngine(4, "train", 2)])


def test_a_lost_node_sends_the_other_one_of_its_replica_to_roll_out() -> None:
    freed = [StopTrainers(4), StandbyEngine(4, "train"), StartEngine(4, "rollout")]
    pool = after(together(), RankLost(3), does=[FormGeneration(3, (1,)), *freed])
    with pytest.raises(IllegalTransition):
        advance(pool, MoveOrdered(4, "train"))
    pool = after(pool, ready(4, "rollout"), RankBack(3), ready(3, "rollout"), does=[StartEngine(3, "rollout")])
    _, effects = play(pool, MoveOrdered(3, "train"), TurnsDrained(3), TurnsDrained(4))
    assert [e for e in effects if isinstance(e, StartEngine)] == [StartEngine(rank, "train", 1) for rank in (3, 4)]


def test_a_node_that_drains_while_the_other_one_is_lost_and_comes_back_rolls_out_with_it() -> None:
    moved = MoveOrdered(3, "rollout"), MemberOf(1, 3), ready(3, "rollout"), ready(4, "rollout")
    pool, _ = play(together(), *moved)
    pool, effects = play(pool, MoveOrdered(3, "train"), RankLost(3), RankBack(3), TurnsDrained(4))
    assert [e for e in effects if isinstance(e, StartEngine)] == [StartEngine(rank, "rollout") for rank in (3, 4)]


ranks = st.integers(1, 5)
kinds = st.sampled_from(["train", "rollout"])
disturbances: st.SearchStrategy[Event] = st.one_of(
    st.builds(MoveOrdered, ranks, kinds), st.builds(lost, ranks, kinds), st.builds(RankLost, ranks)
)
events = st.one_of(
    disturbances,
    st.builds(TurnsDrained, ranks),
    st.builds(ready, ranks, kinds),
    st.builds(StateArrived, ranks),
    st.builds(MemberOf, ranks, st.integers(0, 12)),
    st.builds(RankBack, ranks),
)
COMPONENTS = {1: "train", 2: "train", 3: "rollout", 4: "hybrid", 5: "hybrid"}
UNITS = st.sampled_from([{}, {4: (4, 5), 5: (4, 5)}])
"""Hybrid nodes that move alone, or together."""


def begin(role: str, units: dict[int, tuple[int, ...]]) -> Pool:
    return start(COMPONENTS.items(), role, lambda rank: units.get(rank, (rank,)))  # type: ignore[arg-type]


def check(pool: Pool, before: Pool) -> None:
    for node in pool.nodes.values():
        assert node.component == COMPONENTS[node.rank]
        if node.component != "hybrid":
            assert node.role == node.component
            other = NodeState.ROLLOUT if node.component == "train" else NodeState.TRAIN
            assert node.state not in (NodeState.TO_TRAIN, NodeState.TO_ROLLOUT, other)
        if node.state is NodeState.TRAIN:
            assert node.rank in pool.membership.ranks
            assert node.has_state
        if node.state is NodeState.LOST:
            assert not node.has_state
            assert not node.engine_ready
    assert pool.issued >= before.issued
    if pool.forming is not None and pool.forming != before.forming:
        assert pool.forming.generation == before.issued + 1 == pool.issued
        assert {1, 2} <= set(pool.forming.ranks), "the whole core"
    assert pool.membership.generation > before.membership.generation or pool.membership == before.membership
    # Whoever can train is a member, or will be once what is forming is complete.
    core_at_work = {
        n.rank for n in pool.nodes.values() if n.component == "train" and n.state is NodeState.TRAIN and n.engine_ready
    }
    assert core_at_work <= set(pool.membership.ranks)
    if pool.forming is not None:
        assert core_at_work <= set(pool.forming.ranks)
        units = {rank for member in pool.forming.ranks for rank in pool.nodes[member].unit}
        assert units == set(pool.forming.ranks), "whole replicas"


@settings(max_examples=300, deadline=None)
@given(st.lists(events, max_size=60), kinds, UNITS)
def test_no_sequence_of_events_moves_the_core_or_turns_generations_back(
    sequence: list[Event], role: str, units: dict[int, tuple[int, ...]]
) -> None:
    pool = begin(role, units)
    for event in sequence:
        before = pool
        with contextlib.suppress(IllegalTransition):
            pool = advance(pool, event)
            check(pool, before)
