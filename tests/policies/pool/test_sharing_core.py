"""A core that rolls out, too: it rests, rolls out, and is back for the next generation, whatever ends meanwhile."""

from __future__ import annotations

import pytest

from libra_hpc.policies.pool.states import IllegalTransition, MemberOf, MoveOrdered, Pool, StateArrived, advance, start
from libra_hpc.protocol.agents import TurnsDrained
from libra_hpc.protocol.engine_state import EngineState

from .layout_orders import DrainTurns, FormGeneration, RestCore, StandbyEngine, StartEngine
from .test_states import after, lost, ready, states

CORE = (1, 2)


def rests(rank: int) -> EngineState:
    return EngineState(rank, "train", "standby")


def training(core: tuple[int, ...] = (1,)) -> Pool:
    """The core (1, or 1 and 2), a hybrid node (3) that trains with it, and a rollout node (4)."""
    kinds = [*((rank, "train") for rank in core), (3, "hybrid"), (4, "rollout")]
    pool = start(kinds, "train", lambda rank: core if rank in core else (rank,), core_rolls_out=True)  # type: ignore[arg-type]
    pool = after(pool, ready(4, "rollout"), *(ready(rank, "train") for rank in (*core, 3)))
    generation = pool.issued
    members = (*core, 3)
    return after(pool, *(event for rank in members for event in (StateArrived(rank), MemberOf(rank, generation))))


def rolling(core: tuple[int, ...] = (1,)) -> Pool:
    """All nodes roll out."""
    pool = after(training(core), MoveOrdered(3, "rollout"), MoveOrdered(1, "rollout"))
    generation = pool.issued
    pool = after(pool, *(event for rank in core for event in (StateArrived(rank), MemberOf(rank, generation))))
    pool = after(pool, ready(3, "rollout"), *map(rests, core), *(ready(rank, "rollout") for rank in core))
    assert set(states(pool)) == {"rollout"}
    return pool


def test_the_core_rolls_out_between_two_generations() -> None:
    pool = training()
    pool = after(pool, MoveOrdered(3, "rollout"), does=[FormGeneration(3, (1,))])
    pool = after(pool, MoveOrdered(1, "rollout"), does=[RestCore()])
    pool = after(pool, StateArrived(1), MemberOf(1, 3), does=[StandbyEngine(3, "train"), StartEngine(3, "rollout")])
    assert states(pool) == ["to_rollout", "to_rollout", "rollout"]
    pool = after(pool, rests(1), does=[StandbyEngine(1, "train"), StartEngine(1, "rollout")])
    pool = after(pool, ready(1, "rollout"), ready(3, "rollout"), does=[])
    assert states(pool) == ["rollout"] * 3

    pool = after(pool, MoveOrdered(1, "train", abort=True), does=[DrainTurns(1, abort=True)])
    pool = after(pool, TurnsDrained(1), does=[StandbyEngine(1, "rollout"), StartEngine(1, "train")])
    pool = after(pool, ready(1, "train"), does=[FormGeneration(4, (1,))])
    pool = after(pool, StateArrived(1), MemberOf(1, 4), does=[])
    assert states(pool) == ["train", "rollout", "rollout"]


def test_a_hybrid_node_that_is_ready_first_waits_for_the_core() -> None:
    pool = after(rolling(), MoveOrdered(3, "train"), MoveOrdered(1, "train"))
    pool = after(pool, TurnsDrained(3), TurnsDrained(1))
    pool = after(pool, ready(3, "train"), does=[])
    pool = after(pool, ready(1, "train"), does=[FormGeneration(4, (1, 3))])
    pool = after(pool, *(event for rank in (1, 3) for event in (StateArrived(rank), MemberOf(rank, 4))))
    assert states(pool) == ["train", "train", "rollout"]


def test_nodes_of_the_core_move_together() -> None:
    pool = rolling(CORE)
    pool = after(pool, MoveOrdered(2, "train"), does=[DrainTurns(1), DrainTurns(2)])
    pool = after(pool, TurnsDrained(1), TurnsDrained(2), ready(1, "train"), does=None)
    assert states(pool) == ["to_train", "to_train", "rollout", "rollout"]
    pool = after(pool, ready(2, "train"), does=[FormGeneration(4, CORE)])


def test_a_lost_rollout_engine_sends_the_core_back_to_training() -> None:
    pool = after(rolling(), lost(1, "rollout"), does=[DrainTurns(1, abort=True)])
    pool = after(pool, TurnsDrained(1), ready(1, "train"), StateArrived(1), MemberOf(1, 4))
    assert states(pool) == ["train", "rollout", "rollout"]
    # While it wakes, and in standby.
    pool = after(pool, MoveOrdered(1, "rollout"), rests(1), lost(1, "rollout"), does=None)
    assert states(pool)[0] == "to_train"
    pool = after(pool, TurnsDrained(1), ready(1, "train"), lost(1, "rollout"))
    assert states(pool)[0] == "to_train", "it is in no generation yet"


def test_lost_trainers_bring_the_core_back_before_the_batch_needs_it() -> None:
    pool = after(rolling(), lost(1, "train"), does=[DrainTurns(1, abort=True)])
    pool = after(pool, TurnsDrained(1), does=[StandbyEngine(1, "rollout"), StartEngine(1, "train")])
    pool = after(pool, ready(1, "train"), does=[FormGeneration(4, (1,))])
    # Before they are in standby.
    pool = after(training(), MoveOrdered(1, "rollout"), lost(1, "train"), does=[RestCore(), StartEngine(1, "train")])
    assert states(pool) == ["starting", "train", "rollout"]
    pool = after(pool, ready(1, "train"), does=[FormGeneration(3, (1, 3))])


def test_trainers_that_rest_although_the_core_was_ordered_back_wake() -> None:
    pool = after(training(CORE), MoveOrdered(1, "rollout"), rests(1), lost(1, "rollout"), does=None)
    pool = after(pool, rests(2), does=[StandbyEngine(2, "train")])
    pool = after(pool, TurnsDrained(1), TurnsDrained(2), ready(1, "train"), ready(2, "train"))
    assert pool.forming is not None
    pool = after(pool, rests(1), does=[StartEngine(1, "train")])
    pool = after(pool, ready(1, "train"), does=[FormGeneration(4, (1, 2, 3))])


def test_only_a_core_that_shares_moves() -> None:
    pool = start([(1, "train"), (2, "rollout")])
    for event in (MoveOrdered(1, "rollout"), rests(1)):
        with pytest.raises(IllegalTransition):
            advance(pool, event)
