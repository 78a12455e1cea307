"""The dispatcher: order, refusals, turns set aside, and that no turn is lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from libra_hpc.policies.scheduling.board import Board
from libra_hpc.policies.scheduling.dispatch import MAX_REFUSED, Dispatcher
from libra_hpc.policies.scheduling.protocol import Decision, Finished, TurnView

from .boards import board, finished, set_cap, turn


class Scripted:
    """Keys and routes by trajectory name; by default keys are 0 and any free slot will do."""

    name = "scripted"

    def __init__(self) -> None:
        self.keys: dict[str, float] = {}
        self.routes: dict[str, Callable[[Board], Decision]] = {}
        self.asked: list[str] = []

    def key(self, turn: TurnView, now: float) -> float:
        return self.keys.get(turn.trajectory, 0.0)

    def route(self, turn: TurnView, board: Board, now: float) -> Decision:
        self.asked.append(turn.trajectory)
        return self.routes.get(turn.trajectory, anywhere)(board)

    def finished(self, record: Finished, now: float) -> None:
        self.asked.append(f"finished {record.trajectory}")

    def forget(self, trajectory: str) -> None:
        self.asked.append(f"forget {trajectory}")


def decision(engine: str = "", **wait: Any) -> Decision:
    return Decision(engine=engine, priority=0, level=0, template="", numbers={}, **wait)


def anywhere(board: Board) -> Decision:
    return decision(next((name for name, view in board.engines.items() if view.free), ""))


def refuse(board: Board) -> Decision:
    return decision()


def stay(board: Board) -> Decision:
    return decision("b" if board.engines["b"].free else "", wait="last")


def queued(cap: int = 64) -> tuple[Scripted, Board, Dispatcher]:
    policy, made = Scripted(), board(("a", 1), cap=cap)
    return policy, made, Dispatcher(policy, made)


def names(routed: list[tuple[TurnView, Decision]]) -> list[str]:
    return [view.trajectory for view, _ in routed]


def test_lowest_key_first_then_first_come_and_the_board_counts() -> None:
    policy, made, queue = queued(cap=3)
    policy.keys = {"x": 2.0, "y": 1.0, "z": 1.0, "w": 3.0}
    for name in ("w", "x", "y", "z"):
        queue.ready(turn(name, context=10), 0.0)
    assert names(queue.dispatch(0.0)) == ["y", "z", "x"]
    assert (made.free, made.engines["a"].inflight_tokens, len(queue)) == (0, 30, 1)
    assert queue.dispatch(1.0) == []


def test_a_pass_gives_up_after_so_many_refusals_and_the_next_one_begins_behind_them() -> None:
    policy, _, queue = queued()
    for i in range(2 * MAX_REFUSED):
        policy.routes[str(i)] = refuse
        queue.ready(turn(str(i)), 0.0)
    queue.ready(turn("behind"), 0.0)
    assert [names(queue.dispatch(0.0)) for _ in range(3)] == [[], [], ["behind"]]
    assert policy.asked == [*map(str, range(2 * MAX_REFUSED)), "behind"]
    assert queue.dispatch(0.0) == []
    assert policy.asked[-MAX_REFUSED:] == [str(i) for i in range(MAX_REFUSED)], "all are in their places again"


def test_turns_that_wait_for_their_engine_hold_up_nobody_and_come_with_its_slots() -> None:
    policy, made = Scripted(), board(("a", 1), ("b", 1), cap=2)
    queue = Dispatcher(policy, made)
    set_cap(made, "b", 0)
    for i in range(MAX_REFUSED + 5):
        policy.routes[str(i)] = stay
        queue.ready(turn(str(i), at="b", context=1), 0.0)
    queue.ready(turn("other"), 0.0)
    assert names(queue.dispatch(0.0)) == ["other"]
    policy.asked.clear()
    assert (queue.dispatch(0.0), policy.asked) == ([], []), "none is asked while its engine is full"
    set_cap(made, "b", 2)
    assert names(queue.dispatch(0.0)) == ["0", "1"]
    policy.routes.clear()
    made.applied("b", 1)
    assert names(queue.dispatch(0.0)) == ["2"], "new weights have emptied its cache: any engine will do"


def test_a_turn_whose_engine_closes_goes_elsewhere() -> None:
    policy, made = Scripted(), board(("a", 1), ("b", 1), cap=1)
    queue = Dispatcher(policy, made)
    made.sent("b", 1)
    policy.routes["t"] = stay
    queue.ready(turn("t", at="b"), 0.0)
    assert queue.dispatch(0.0) == []
    made.set_open("b", False)
    policy.routes.clear()
    assert names(queue.dispatch(0.0)) == ["t"]


def test_a_first_turn_whose_policy_waits_for_its_last_engine_is_offered_again() -> None:
    policy, _, queue = queued()
    policy.routes["t"] = lambda _: decision(wait="last")
    queue.ready(turn("t"), 0.0)
    assert queue.dispatch(0.0) == []
    policy.routes.clear()
    assert names(queue.dispatch(0.0)) == ["t"]


def test_the_end_of_a_sibling_recomputes_the_keys_of_waiting_turns() -> None:
    policy, made, queue = queued(cap=1)
    policy.keys = {"p1": 5.0, "q1": 1.0}
    queue.ready(turn("p1", "p", context=1), 0.0)
    queue.ready(turn("q1", "q", context=1), 0.0)
    policy.keys["p1"] = 0.0
    queue.finished(finished(5, "p"), 0.0)
    assert names(queue.dispatch(0.0)) == ["p1"]
    made.answered("a", 1)
    assert names(queue.dispatch(0.0)) == ["q1"], "the old entry of p1 is dead"


def test_withdrawn_and_replaced_turns_do_not_come() -> None:
    _, _, queue = queued()
    queue.ready(turn("t", context=1), 0.0)
    queue.ready(turn("t", context=2), 0.0)
    queue.ready(turn("u"), 0.0)
    queue.withdraw("u")
    queue.withdraw("u")
    assert [view.context_tokens for view, _ in queue.dispatch(0.0)] == [2]
    assert len(queue) == 0


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from("rdfaw"), st.integers(0, 9), st.sampled_from((refuse, stay, anywhere))), max_size=60
    )
)
def test_no_turn_is_lost_or_sent_twice(steps: list[tuple[str, int, Callable[[Board], Decision]]]) -> None:
    policy, made = Scripted(), board(("a", 1), ("b", 2), cap=2)
    queue = Dispatcher(policy, made)
    waiting: set[str] = set()
    in_flight: list[str] = []
    for what, i, route in steps:
        name = str(i)
        if what == "r" and name not in waiting:
            policy.routes[name] = route
            queue.ready(turn(name, f"p{i % 3}", at="b", context=5), 0.0)
            waiting.add(name)
        elif what == "w":
            queue.withdraw(name)
            waiting.discard(name)
        elif what == "f":
            queue.finished(finished(5, f"p{i % 3}"), 0.0)
        elif what == "a" and in_flight:
            made.answered(in_flight.pop(), 5)
        for view, found in queue.dispatch(0.0) if what == "d" else ():
            assert view.trajectory in waiting
            waiting.discard(view.trajectory)
            in_flight.append(found.engine)
        assert len(queue) == len(waiting)
        assert all(v.inflight <= v.cap for v in made.engines.values())
    policy.routes.clear()
    while waiting:
        while in_flight:
            made.answered(in_flight.pop(), 5)
        routed = queue.dispatch(0.0)
        assert routed
        waiting -= {view.trajectory for view, _ in routed}
        in_flight += [found.engine for _, found in routed]
