"""A core that rolls out, too: it rests, rolls out, and is back for the next generation, whatever ends meanwhile."""

from __future__ import annotations

from functools import partial

import pytest

from libra_hpc.policies.pool.states import (
    EnginesAre,
    IllegalTransition,
    MemberOf,
    MoveOrdered,
    Pool,
    StateArrived,
    TurnsDrained,
    advance,
    start,
)

from .layout_orders import DrainTurns, FormGeneration, RestCore, StandbyEngine, StartEngine
from .test_states import Story, Then, after, lost, ready, states, tell

CORE = (1, 2)


def rests(rank: int) -> EnginesAre:
    return EnginesAre(rank, "train", "standby")


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


STORIES: dict[str, Story] = {
    "it rolls out between two generations": (
        training,
        [
            ([MoveOrdered(3, "rollout")], Then([FormGeneration(3, (1,))])),
            ([MoveOrdered(1, "rollout")], Then([RestCore()])),
            (
                [StateArrived(1), MemberOf(1, 3)],
                Then([StandbyEngine(3, "train"), StartEngine(3, "rollout")], states="to_rollout to_rollout rollout"),
            ),
            ([rests(1)], Then([StandbyEngine(1, "train"), StartEngine(1, "rollout")])),
            ([ready(1, "rollout"), ready(3, "rollout")], Then([], states="rollout rollout rollout")),
            ([MoveOrdered(1, "train", abort=True)], Then([DrainTurns(1, abort=True)])),
            ([TurnsDrained(1)], Then([StandbyEngine(1, "rollout"), StartEngine(1, "train")])),
            ([ready(1, "train")], Then([FormGeneration(4, (1,))])),
            ([StateArrived(1), MemberOf(1, 4)], Then([], states="train rollout rollout")),
        ],
    ),
    "a hybrid node that is ready first waits for it": (
        rolling,
        [
            ([MoveOrdered(3, "train"), MoveOrdered(1, "train"), TurnsDrained(3), TurnsDrained(1)], Then()),
            ([ready(3, "train")], Then([])),
            ([ready(1, "train")], Then([FormGeneration(4, (1, 3))])),
            ([StateArrived(1), MemberOf(1, 4), StateArrived(3), MemberOf(3, 4)], Then(states="train train rollout")),
        ],
    ),
    "its nodes move together": (
        partial(rolling, CORE),
        [
            ([MoveOrdered(2, "train")], Then([DrainTurns(1), DrainTurns(2)])),
            ([TurnsDrained(1), TurnsDrained(2), ready(1, "train")], Then(states="to_train to_train rollout rollout")),
            ([ready(2, "train")], Then([FormGeneration(4, CORE)])),
        ],
    ),
    "a lost rollout engine sends it back to training": (
        rolling,
        [
            ([lost(1, "rollout")], Then([DrainTurns(1, abort=True)])),
            (
                [TurnsDrained(1), ready(1, "train"), StateArrived(1), MemberOf(1, 4)],
                Then(states="train rollout rollout"),
            ),
            # While it wakes, and in standby, when it is in no generation yet.
            ([MoveOrdered(1, "rollout"), rests(1), lost(1, "rollout")], Then(states="to_train rollout rollout")),
            ([TurnsDrained(1), ready(1, "train"), lost(1, "rollout")], Then(states="to_train rollout rollout")),
        ],
    ),
    "lost trainers bring it back before the batch needs it": (
        rolling,
        [
            ([lost(1, "train")], Then([DrainTurns(1, abort=True)])),
            ([TurnsDrained(1)], Then([StandbyEngine(1, "rollout"), StartEngine(1, "train")])),
            ([ready(1, "train")], Then([FormGeneration(4, (1,))])),
        ],
    ),
    "trainers that are lost before they are in standby start again": (
        training,
        [
            (
                [MoveOrdered(1, "rollout"), lost(1, "train")],
                Then([RestCore(), StartEngine(1, "train")], states="starting train rollout"),
            ),
            ([ready(1, "train")], Then([FormGeneration(3, (1, 3))])),
        ],
    ),
    "trainers that rest although it was ordered back wake": (
        partial(training, CORE),
        [
            ([MoveOrdered(1, "rollout"), rests(1), lost(1, "rollout")], Then()),
            ([rests(2)], Then([StandbyEngine(2, "train")])),
            ([TurnsDrained(1), TurnsDrained(2), ready(1, "train"), ready(2, "train")], Then()),
            ([rests(1)], Then([StartEngine(1, "train")])),
            ([ready(1, "train")], Then([FormGeneration(4, (1, 2, 3))])),
        ],
    ),
}


@pytest.mark.parametrize("name", STORIES)
def test_what_a_core_that_shares_does(name: str) -> None:
    tell(STORIES[name])


def test_only_a_core_that_shares_moves() -> None:
    pool = start([(1, "train"), (2, "rollout")])
    for event in (MoveOrdered(1, "rollout"), rests(1)):
        with pytest.raises(IllegalTransition):
            advance(pool, event)
