"""The pool's state machine: the paths of a node, and what no sequence of events can break."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libra_hpc.policies.pool.states import (
    EnginesAre,
    Event,
    IllegalTransition,
    MemberOf,
    MoveOrdered,
    NodeState,
    Pool,
    RankBack,
    RankLost,
    StateArrived,
    TurnsDrained,
    advance,
    rollout_nodes,
    start,
    trainers,
)
from libra_hpc.protocol.layout import Layout

from . import layout_orders as orders_of
from .layout_orders import DrainTurns, FormGeneration, StandbyEngine, StartEngine, StopTrainers, layout_of


def ready(rank: int, kind: str) -> EnginesAre:
    return EnginesAre(rank, kind, "ready")  # type: ignore[arg-type]


def lost(rank: int, kind: str, world: int = 0) -> EnginesAre:
    return EnginesAre(rank, kind, "lost", world)  # type: ignore[arg-type]


def play(pool: Pool, *events: Event) -> tuple[Pool, list[Any]]:
    """The pool after ``events``, and what nodes and leaders find in their rows, less who was lost and is back."""
    found: list[Any] = []
    for event in events:
        before, pool = pool, advance(pool, event)
        found += orders(before, pool, event)
    return pool, found


def orders(before: Pool, pool: Pool, event: Event) -> list[Any]:
    trainers_ended = isinstance(event, EnginesAre) and (event.kind, event.state) == ("train", "lost")
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


class Then(NamedTuple):
    """What follows from events: all orders, who trains and who rolls out, and all states; None: whatever does."""

    does: list[Any] | None = None
    trains: tuple[int, ...] | None = None
    rolls: tuple[int, ...] | None = None
    states: str | None = None


Story = tuple[Callable[[], Pool], list[tuple[list[Event], Then]]]


def tell(story: Story) -> None:
    pool = story[0]()
    for events, then in story[1]:
        pool = after(pool, *events, does=then.does)
        assert then.trains is None or trainers(pool) == then.trains
        assert then.rolls is None or rollout_nodes(pool) == then.rolls
        assert then.states is None or " ".join(states(pool)) == then.states


def test_start_brings_every_node_to_its_stage() -> None:
    pool = start([(1, "train"), (2, "rollout"), (3, "hybrid")])
    effects = orders_of.orders(Layout(), layout_of(pool))
    assert effects == [StartEngine(1, "train"), StartEngine(2, "rollout"), StartEngine(3, "rollout")]
    assert states(running()) == ["train", "rollout", "rollout"]
    assert states(running("train")) == ["train", "rollout", "train"]


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


SLEEPS = {rank: StandbyEngine(rank, "rollout") for rank in (3, 4)}
TRAIN = {rank: StartEngine(rank, "train", 1) for rank in (3, 4)}
FREED = {rank: StandbyEngine(rank, "train") for rank in (3, 4)}
BACK = {rank: StartEngine(rank, "rollout") for rank in (3, 4)}
TRAINS = partial(running, "train")
STORIES: dict[str, Story] = {
    "a generation waits for all nodes of the core, the rest of which has only a part of the state": (
        lambda: start([(1, "train"), (2, "train"), (3, "rollout")]),
        [
            ([ready(2, "train")], Then([])),
            ([ready(1, "train")], Then([FormGeneration(1, (1, 2))])),
            ([lost(2, "train")], Then([StartEngine(2, "train")])),
            ([ready(2, "train")], Then([FormGeneration(2, (1, 2))])),
        ],
    ),
    "a node that goes to train counts only with its state": (
        running,
        [
            ([MoveOrdered(3, "train")], Then([DrainTurns(3)])),
            ([TurnsDrained(3)], Then([StandbyEngine(3, "rollout"), StartEngine(3, "train")], trains=(1,))),
            ([ready(3, "train")], Then([FormGeneration(2, (1, 3))])),
            ([MemberOf(1, 2), MemberOf(3, 2)], Then([], trains=(1,))),
            ([StateArrived(3)], Then([], trains=(1, 3), states="train rollout train")),
        ],
    ),
    "a node that goes to roll out works until the step boundary and leaves with the next generation": (
        TRAINS,
        [
            ([MoveOrdered(3, "rollout")], Then([FormGeneration(3, (1,))], trains=(1, 3))),
            ([MemberOf(1, 3)], Then([StandbyEngine(3, "train"), StartEngine(3, "rollout")], trains=(1,))),
            ([ready(3, "rollout")], Then([], rolls=(2, 3))),
        ],
    ),
    "a killed replica is left out and comes back as a new member": (
        TRAINS,
        [
            ([lost(3, "train")], Then([FormGeneration(3, (1,)), StartEngine(3, "train")], trains=(1,))),
            # The confirmation of a generation that was superseded comes late.
            ([ready(3, "train"), MemberOf(1, 3)], Then([FormGeneration(4, (1, 3))])),
            # An earlier generation holds its rank, but its new engine is in no group yet.
            ([StateArrived(3)], Then([], trains=(1,))),
            ([MemberOf(1, 4), MemberOf(3, 4)], Then([], trains=(1, 3))),
        ],
    ),
    "the core dies and the others wait until it is rebuilt": (
        TRAINS,
        [
            ([lost(1, "train")], Then([StartEngine(1, "train")], trains=(3,))),
            ([ready(1, "train")], Then([FormGeneration(3, (1, 3))])),
            ([StateArrived(1), MemberOf(1, 3), StateArrived(3), MemberOf(3, 3)], Then(trains=(1, 3))),
        ],
    ),
    "a node leaves training also while the core is rebuilt": (
        TRAINS,
        [
            ([lost(1, "train"), MoveOrdered(3, "rollout")], Then([StartEngine(1, "train")])),
            (
                [ready(1, "train"), MemberOf(1, 3)],
                Then([FormGeneration(3, (1,)), StandbyEngine(3, "train"), StartEngine(3, "rollout")]),
            ),
        ],
    ),
    "a rollout engine that died is started again": (
        running,
        [([lost(2, "rollout")], Then([StartEngine(2, "rollout")], rolls=(3,)))],
    ),
    "a rollout engine that dies on the way to training needs no drain": (
        running,
        [
            (
                [MoveOrdered(3, "train"), lost(3, "rollout")],
                Then([DrainTurns(3), StandbyEngine(3, "rollout"), StartEngine(3, "train")]),
            )
        ],
    ),
    "a lost node returns to its role": (
        TRAINS,
        [
            ([RankLost(3)], Then([FormGeneration(3, (1,))])),
            ([RankLost(3), RankBack(3)], Then([StartEngine(3, "train")])),
            ([RankLost(2)], Then([], rolls=())),
        ],
    ),
    "an engine in standby that dies changes nothing": (
        running,
        [([lost(3, "train")], Then([], trains=(1,), states="train rollout rollout"))],
    ),
    "an engine that dies after it left is already freed": (
        TRAINS,
        [
            ([MoveOrdered(3, "rollout")], Then()),
            ([lost(3, "train")], Then([StandbyEngine(3, "train"), StartEngine(3, "rollout")])),
            ([MemberOf(1, 3)], Then([], trains=(1,))),
        ],
    ),
    "nodes that are one replica move together": (
        together,
        [
            ([MoveOrdered(3, "rollout")], Then([FormGeneration(3, (1,))])),
            (
                [MemberOf(1, 3), ready(3, "rollout"), ready(4, "rollout")],
                Then([FREED[3], FREED[4], BACK[3], BACK[4]], rolls=(2, 3, 4, 5)),
            ),
        ],
    ),
    "a process that ends takes its whole replica down and both nodes begin anew": (
        together,
        [
            (
                [lost(3, "train")],
                Then(
                    [FormGeneration(3, (1,)), StartEngine(3, "train", 1), StopTrainers(4), StartEngine(4, "train", 1)]
                ),
            ),
            # What the other node says of the same death.
            ([lost(4, "train", 0)], Then([])),
            ([lost(4, "train", 1)], Then([StopTrainers(3), StartEngine(3, "train", 2), StartEngine(4, "train", 2)])),
        ],
    ),
    "a lost node sends the other one of its replica to roll out": (
        together,
        [
            ([RankLost(3)], Then([FormGeneration(3, (1,)), StopTrainers(4), FREED[4], BACK[4]])),
            ([ready(4, "rollout"), RankBack(3), ready(3, "rollout")], Then([StartEngine(3, "rollout")])),
            (
                [MoveOrdered(3, "train"), TurnsDrained(3), TurnsDrained(4)],
                Then([DrainTurns(3), DrainTurns(4), SLEEPS[3], SLEEPS[4], TRAIN[3], TRAIN[4]]),
            ),
        ],
    ),
    "a node that drains while the other one is lost and comes back rolls out with it": (
        together,
        [
            ([MoveOrdered(3, "rollout"), MemberOf(1, 3), ready(3, "rollout"), ready(4, "rollout")], Then()),
            (
                [MoveOrdered(3, "train"), RankLost(3), RankBack(3), TurnsDrained(4)],
                Then([DrainTurns(3), DrainTurns(4), StopTrainers(4), BACK[3], BACK[4]]),
            ),
        ],
    ),
}


@pytest.mark.parametrize("name", STORIES)
def test_what_follows_from_events(name: str) -> None:
    tell(STORIES[name])


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
