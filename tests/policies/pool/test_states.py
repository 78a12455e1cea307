"""The pool's state machine: the paths of a node, and what no sequence of events can break."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libra_hpc.policies.pool.states import (
    Effect,
    Event,
    IllegalTransition,
    MemberOf,
    MoveOrdered,
    NodeState,
    Pool,
    StateArrived,
    advance,
    rollout_nodes,
    start,
    trainers,
)
from libra_hpc.protocol.agents import (
    DrainTurns,
    FormGeneration,
    RankBack,
    RankLost,
    StandbyEngine,
    StartEngine,
    StopTrainers,
    TurnsDrained,
)
from libra_hpc.protocol.engine_state import EngineState


def ready(rank: int, kind: str) -> EngineState:
    return EngineState(rank, kind, "ready")  # type: ignore[arg-type]


def lost(rank: int, kind: str, world: int = 0) -> EngineState:
    return EngineState(rank, kind, "lost", world=world)  # type: ignore[arg-type]


def play(pool: Pool, *events: Event) -> tuple[Pool, list[Effect]]:
    effects: list[Effect] = []
    for event in events:
        pool, more = advance(pool, event)
        effects += more
    return pool, effects


def after(pool: Pool, *events: Event, does: list[Effect] | None = None) -> Pool:
    """The pool after ``events``, which have the effects ``does``."""
    pool, effects = play(pool, *events)
    assert does is None or effects == does
    return pool


def running(hybrid: str = "rollout") -> Pool:
    """Nodes 1 (train), 2 (rollout), 3 (hybrid), all at work."""
    pool, _ = start([(1, "train"), (2, "rollout"), (3, "hybrid")], "train" if hybrid == "train" else "rollout")
    pool = after(pool, ready(1, "train"), MemberOf(1, 1), StateArrived(1), ready(2, "rollout"), ready(3, hybrid))
    return pool if hybrid == "rollout" else after(pool, StateArrived(3), MemberOf(1, 2), MemberOf(3, 2))


def states(pool: Pool) -> list[str]:
    return [str(node.state) for node in pool.nodes.values()]


def test_start_brings_every_node_to_its_stage() -> None:
    _, effects = start([(1, "train"), (2, "rollout"), (3, "hybrid")])
    assert effects == (StartEngine(1, "train"), StartEngine(2, "rollout"), StartEngine(3, "rollout"))
    assert states(running()) == ["train", "rollout", "rollout"]
    assert states(running("train")) == ["train", "rollout", "train"]


def test_a_generation_waits_for_all_nodes_of_the_core() -> None:
    pool, _ = start([(1, "train"), (2, "train"), (3, "rollout")])
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
    assert pool.membership.ranks == (1, 3)
    assert trainers(pool) == (1,)
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
    pool = after(
        pool,
        ready(1, "train"),
        MemberOf(1, 3),
        does=[FormGeneration(3, (1,)), StandbyEngine(3, "train"), StartEngine(3, "rollout")],
    )


def test_a_rollout_engine_that_died_is_drained_and_started_again() -> None:
    pool = after(running(), lost(2, "rollout"), does=[StartEngine(2, "rollout")])
    assert rollout_nodes(pool) == (3,)
    after(running(), MoveOrdered(3, "train"), lost(3, "rollout"), does=[DrainTurns(3), StartEngine(3, "train")])


def test_a_lost_node_returns_to_its_role() -> None:
    pool = after(running("train"), RankLost(3), does=[FormGeneration(3, (1,))])
    pool = after(pool, RankLost(3), RankBack(3), does=[StartEngine(3, "train")])
    pool, effects = play(pool, RankLost(2))
    assert (effects, rollout_nodes(pool)) == ([], ())


def test_a_standby_that_dies_changes_nothing() -> None:
    pool = running()
    assert advance(pool, lost(3, "train")) == (pool, ())
    pool, effects = play(running("train"), MoveOrdered(3, "rollout"), lost(3, "train"))
    assert effects[-1] == StartEngine(3, "rollout")
    assert trainers(pool) == (1,)
    assert play(pool, MemberOf(1, 3))[1] == [], "already freed"


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
    pool, _ = start(components, unit=lambda rank: (3, 4) if rank in (3, 4) else (rank,))  # type: ignore[arg-type]
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
    pool = after(together(), RankLost(3), does=[FormGeneration(3, (1,)), StopTrainers(4), StartEngine(4, "rollout")])
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


def begin(role: str, units: dict[int, tuple[int, ...]]) -> tuple[Pool, tuple[Effect, ...]]:
    return start(COMPONENTS.items(), role, lambda rank: units.get(rank, (rank,)))  # type: ignore[arg-type]


def silenced(message: Event, event: Event) -> bool:
    """Whether a message on its way will never come because of this crash; confirmations may still come late."""
    if message.rank != event.rank or isinstance(message, MemberOf):
        return False
    if isinstance(event, RankLost):
        return not isinstance(message, RankBack)
    if isinstance(event, EngineState):
        return (isinstance(message, EngineState) and message.kind == event.kind) or isinstance(
            message, TurnsDrained if event.kind == "rollout" else StateArrived
        )
    return False


def check(pool: Pool, before: Pool, effects: tuple[Effect, ...]) -> None:
    for node in pool.nodes.values():
        assert node.component == COMPONENTS[node.rank]
        if node.component != "hybrid":
            assert node.role == node.component
            assert node.state not in (NodeState.TO_TRAIN, NodeState.TO_ROLLOUT)
            assert node.state is not (NodeState.ROLLOUT if node.component == "train" else NodeState.TRAIN)
        if node.state is NodeState.TRAIN:
            assert node.rank in pool.membership.ranks
            assert node.has_state
        if node.state is NodeState.LOST:
            assert not node.has_state
            assert not node.engine_ready
    assert pool.issued >= before.issued
    assert pool.membership.generation >= before.membership.generation
    formed = [e for e in effects if isinstance(e, FormGeneration)]
    assert len(formed) <= 1
    if formed:
        assert formed[0].generation == before.issued + 1 == pool.issued
        assert {1, 2} <= set(formed[0].ranks), "the whole core"
        assert pool.forming is not None
        assert formed[0].ranks == pool.forming.ranks
    if pool.membership != before.membership:
        assert pool.membership.generation > before.membership.generation
    # Whoever can train is a member, or will be once what is forming is complete.
    core_at_work = {
        n.rank for n in pool.nodes.values() if n.component == "train" and n.state is NodeState.TRAIN and n.engine_ready
    }
    assert core_at_work <= set(pool.membership.ranks)
    if pool.forming is not None:
        assert core_at_work <= set(pool.forming.ranks)
        for rank in pool.forming.ranks:
            assert set(pool.nodes[rank].unit) <= set(pool.forming.ranks), "a whole replica"


@settings(max_examples=300, deadline=None)
@given(st.lists(events, max_size=60), kinds, UNITS)
def test_no_sequence_of_events_moves_the_core_or_turns_generations_back(
    sequence: list[Event], role: str, units: dict[int, tuple[int, ...]]
) -> None:
    pool, _ = begin(role, units)
    for event in sequence:
        before = pool
        effects: tuple[Effect, ...] = ()
        with contextlib.suppress(IllegalTransition):
            pool, effects = advance(pool, event)
        check(pool, before, effects)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_whatever_happened_an_obedient_cluster_comes_to_rest_with_every_core_node_at_work(data: st.DataObject) -> None:
    """Drive the machine by its own effects, with moves, crashes and losses thrown in; afterwards let the cluster
    finish what was asked."""
    pool, first = begin(data.draw(kinds), data.draw(UNITS))
    inbox: list[Event] = []
    worlds: dict[int, int] = {}
    """The training world that each node has processes of."""

    def answers(rank: int, kind: str) -> list[Event]:
        """A training world of several nodes answers once all have started it."""
        unit = pool.nodes[rank].unit if kind == "train" else (rank,)
        whole = kind == "rollout" or len({worlds.get(other, -1) for other in unit}) == 1
        here = [ready(other, kind) for other in unit if not pool.nodes[other].engine_ready]  # type: ignore[arg-type]
        return here if whole else []

    def obey(effects: tuple[Effect, ...]) -> None:
        for effect in effects:
            match effect:
                case StartEngine(rank=rank, kind=kind, world=world):
                    if kind == "train":
                        worlds[rank] = world
                    said = answers(rank, kind)
                    ranks = {rank} | {event.rank for event in said}
                    inbox[:] = [e for e in inbox if not (isinstance(e, EngineState) and e.rank in ranks)]
                    inbox.extend(said)
                case StopTrainers(rank=rank):
                    worlds[rank] = -1 - rank
                    inbox[:] = [e for e in inbox if e != ready(rank, "train")]
                case DrainTurns(rank=rank):
                    inbox.append(TurnsDrained(rank))
                case FormGeneration(generation=generation, ranks=members):
                    inbox.extend(MemberOf(rank, generation) for rank in members)
                    inbox.extend(StateArrived(rank) for rank in members if not pool.nodes[rank].has_state)
                case _:
                    pass

    def apply(event: Event) -> None:
        nonlocal pool
        if isinstance(event, EngineState) and event.state == "lost":
            event = lost(event.rank, event.kind, pool.nodes[event.rank].world)
        before = pool
        try:
            pool, effects = advance(pool, event)
        except IllegalTransition:
            return
        check(pool, before, effects)
        obey(effects)

    obey(first)
    for _ in range(data.draw(st.integers(0, 40))):
        if len(inbox) > 0 and data.draw(st.integers(0, 2)) > 0:
            picked = data.draw(st.integers(0, len(inbox) - 1))
            apply(inbox.pop(picked))
            continue
        event = data.draw(disturbances)
        inbox[:] = [e for e in inbox if not silenced(e, event)]
        apply(event)
        if isinstance(event, RankLost) and pool.nodes[event.rank].state is NodeState.LOST:
            inbox.append(RankBack(event.rank))
    for _ in range(300):
        if inbox:
            apply(inbox.pop(0))
    assert not inbox
    assert pool.forming is None
    for node in pool.nodes.values():
        assert node.state is (NodeState.TRAIN if node.role == "train" else NodeState.ROLLOUT)
        assert node.engine_ready
    assert (
        set(trainers(pool))
        == {rank for rank, node in pool.nodes.items() if node.role == "train"}
        == set(pool.membership.ranks)
    )
