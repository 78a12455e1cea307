"""Mid-turn moves: a running turn that binds the batch is interrupted and goes on, with what it has generated, at an
engine where its steps are shorter.

A trajectory changes engine in its tool gaps (`cmlfq`).  A long turn has none, so it stays where it was put when nothing
was known of it, beside others as long, while engines of the same or a faster class run out of work.  Whoever drives the
policy asks (`Rebalances`) while nothing waits, aborts the turns it is told to, and offers them anew with their partial
output; that they may be moved at all is the driver's promise, which ones is decided here.

Trajectory j with l_j tokens expected to be left runs at engine e, whose residents' contexts add up to K_e, and ends in

    f_j = l_j * step_e,   step_e = base + slope * K_e.

The late finish is sum_j f_j ** 4, as in `cmlfq`, but over trajectories: the question is not how much work an engine
has, but whose steps share an engine with too much context.  Interrupting j at a and going on at b changes the steps of
both engines' residents, and costs prefill_b * context.  It is done, the best first, when all of these hold:

* *it gains itself*: it ends before `FASTER` = 0.95 of f_j, prefill included.  So nothing is ever pushed to a slower
  place for others' sake, which was right only when the estimates were.
* *it binds the batch*: the late finish falls by more than `GAIN` = 4 %, which is 1 % of the makespan it stands for.
* *the price is earned*: what the tokens generated so far in this turn, at this engine, would have saved at b is at
  least `RENT` = 4 times the prefill. Somebody who rents until the rent has reached the price never pays more than twice
  what foresight would have (ski rental).  A turn that will soon be over is left to its gap, and one that has moved must
  earn the price again: nothing goes back and forth.
* *the batch is in its tail*: at most `TAIL` = 4 open trajectories per engine.  Before, engines are full and short ones
  end everywhere all the time.

On simulated batches of one long turn each (`math`, 40 seeds) this saves 4 % of the makespan, where turns are short from
1 % to nothing.  Rents of 1 to 16, gains of 0.5 to 4 % and tails of 2 and more are equally fast; the ones chosen move
least where little is to be gained.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, runtime_checkable

import msgspec

from .board import Board, EngineView
from .protocol import TurnView

MAX_TIME_RATIO = 0.95
MIN_GAIN = 0.04
MIN_SAVED_PREFILLS = 4.0
MAX_OPEN_PER_ENGINE = 4
MAX_MOVES = 8
"""Moves at one look: so many prefills at once are still nothing to engines that are nearly idle."""

MIGRATES = (
    "move in mid-turn: {generated:.0f} tokens into it, {engine} ends the rest {saves_s:.1f} s sooner than {source}"
    " would in {left_s:.1f} s, though {context:.0f} tokens are prefilled again; {remaining:.0f} tokens expected"
)


class Running(msgspec.Struct, frozen=True):
    """A turn in flight."""

    turn: TurnView
    """As it was sent, ``engine`` being where it runs."""
    generated: int
    """Tokens since it was sent, as far as is known: the steps its engine has reported since, each of which gives
    every running sequence one."""


class Move(msgspec.Struct, frozen=True):
    """A running turn that should go on elsewhere."""

    trajectory: str
    turns: int
    """Turns done before the interrupted one."""
    source: str
    target: str
    numbers: Mapping[str, float | str]

    @property
    def reason(self) -> str:
        """The reason as a sentence."""
        return MIGRATES.format(**self.numbers)


@runtime_checkable
class Rebalances(Protocol):
    """A policy that may move running turns."""

    def rebalance(self, running: Iterable[Running], board: Board, now: float) -> Sequence[Move]:
        """Which turns to interrupt now.  Each is offered to `Policy.route` again, as any other turn, once its engine
        has given it back."""


class OpenTrajectory:
    """A trajectory as `moves` sees it; ``generated`` is 0 while its tool runs."""

    __slots__ = ("context", "engine", "generated", "left", "name", "turns")

    def __init__(self, name: str, turns: int, engine: str, left: float, context: float, generated: float) -> None:
        self.name, self.turns, self.engine = name, turns, engine
        self.left, self.context, self.generated = left, context, generated


class _Load:
    """Contexts of an engine's residents, and the sum of the fourth powers of what they have left."""

    __slots__ = ("context", "left4", "view")

    def __init__(self, view: EngineView) -> None:
        self.view = view
        self.context = self.left4 = 0.0

    def add(self, trajectory: OpenTrajectory, sign: float = 1.0) -> None:
        self.context = max(0.0, self.context + sign * trajectory.context)
        self.left4 = max(0.0, self.left4 + sign * trajectory.left**4)

    def step_s(self, more: float = 0.0) -> float:
        tp_class = self.view.tp_class
        return tp_class.base_s + tp_class.slope_s * max(0.0, self.context + more)


def choose_moves(board: Board, trajectories: Iterable[OpenTrajectory]) -> list[Move]:
    """See the module; the best first, each with those before it taken for done."""
    loads = {name: _Load(view) for name, view in board.engines.items()}
    placed = [trajectory for trajectory in trajectories if trajectory.engine in loads]
    for trajectory in placed:
        loads[trajectory.engine].add(trajectory)
    movable = [trajectory for trajectory in placed if trajectory.generated > 0.0]
    found: list[Move] = []
    while movable and len(found) < MAX_MOVES:
        least = MIN_GAIN * sum(load.step_s() ** 4 * load.left4 for load in loads.values())
        best: tuple[OpenTrajectory, _Load] | None = None
        targets = _targets(board, loads)
        for trajectory in movable:
            for target in targets:
                gain = _gain(trajectory, loads[trajectory.engine], target)
                if gain > least:
                    least, best = gain, (trajectory, target)
        if best is None:
            break
        trajectory, target = best
        found.append(_move_of(trajectory, loads[trajectory.engine], target))
        movable.remove(trajectory)
        loads[trajectory.engine].add(trajectory, -1.0)
        target.add(trajectory)
    return found


def _targets(board: Board, loads: Mapping[str, _Load]) -> list[_Load]:
    """Of each TP class the engine with the shortest step among those that would start a turn at once."""
    able = (
        [loads[view.engine] for view in tp_class.members if view.free and not view.waiting]
        for tp_class in board.classes
    )
    return [min(some, key=_Load.step_s) for some in able if some]


def _gain(trajectory: OpenTrajectory, source: _Load, target: _Load) -> float:
    """By how much the late finish falls, seconds to the fourth; 0.0 when a rule forbids the move."""
    if target is source or target.context + trajectory.context > target.view.kv_capacity:
        return 0.0
    left, context = trajectory.left, trajectory.context
    here, there = source.step_s(), target.step_s(context)
    prefill_s = target.view.tp_class.prefill_s * context
    own_s = left * there + prefill_s
    if own_s > MAX_TIME_RATIO * left * here or trajectory.generated * (here - there) < MIN_SAVED_PREFILLS * prefill_s:
        return 0.0
    before = here**4 * source.left4 + target.step_s() ** 4 * target.left4
    after = source.step_s(-context) ** 4 * (source.left4 - left**4) + there**4 * target.left4 + own_s**4
    return before - after


def _move_of(trajectory: OpenTrajectory, source: _Load, target: _Load) -> Move:
    left_s = trajectory.left * source.step_s()
    own_s = trajectory.left * target.step_s(trajectory.context) + target.view.tp_class.prefill_s * trajectory.context
    numbers: dict[str, float | str] = {
        "remaining": trajectory.left,
        "generated": trajectory.generated,
        "context": trajectory.context,
        "left_s": left_s,
        "saves_s": left_s - own_s,
        "source": source.view.engine,
        "engine": target.view.engine,
    }
    return Move(
        trajectory=trajectory.name,
        turns=trajectory.turns,
        source=source.view.engine,
        target=target.view.engine,
        numbers=numbers,
    )
