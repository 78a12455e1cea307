"""Migration of a running turn: it is interrupted and continues, with its output so far, where steps are shorter.

Trajectories change engine in tool gaps (`cmlfq`); a long turn has none.  Trajectory j with l_j tokens left, at an
engine whose contexts add up to K, ends in

    f_j = l_j * (base + slope * K) seconds, and the late finish is sum over j of f_j ** 4.

A move costs the prefill of the context.  The best is done first, when all hold:

- The batch is in its tail: at most `MAX_OPEN_PER_ENGINE` open trajectories per engine.
- The turn ends before `MAX_TIME_RATIO` of f_j, prefill included.
- The late finish falls by more than `MIN_GAIN`.
- The tokens of this turn so far would have saved `MIN_SAVED_PREFILLS` prefills at the target (ski rental).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, runtime_checkable

import msgspec

from .board import Board, EngineView
from .protocol import TurnView

MAX_TIME_RATIO = 0.95
"""Below 1, so that no turn moves to a slower engine for the sake of others."""
MIN_GAIN = 0.04
"""Share of the late finish; 4 % of a sum of fourth powers is 1 % of the makespan.  0.5 to 4 % are equally fast."""
MIN_SAVED_PREFILLS = 4.0
"""Excludes turns that are nearly over, and moves back and forth.  1 to 16 are equally fast."""
MAX_OPEN_PER_ENGINE = 4
"""Above it engines are full, and short trajectories end everywhere.  2 and more are equally fast."""
MAX_MOVES = 8
"""Moves per evaluation: so many prefills cost little at engines that are nearly idle."""

MIGRATES = (
    "migrate: {generated:.0f} tokens into the turn, {engine} ends the rest {saves_s:.1f} s sooner than {source}"
    " would in {left_s:.1f} s, though {context:.0f} tokens are prefilled again; {remaining:.0f} tokens expected"
)


class Running(msgspec.Struct, frozen=True):
    """A turn in flight, as the driver of a policy describes it."""

    turn: TurnView
    """The turn that was sent; ``engine`` is where it runs."""
    generated: int
    """Tokens since it was sent: the steps its engine has reported since, one token per step."""


class TurnMigration(msgspec.Struct, frozen=True):
    """A running turn that continues at another engine."""

    trajectory: str
    turns: int
    """Finished turns before the interrupted one."""
    source: str
    target: str
    numbers: Mapping[str, float | str]

    @property
    def reason(self) -> str:
        """The reason as a sentence."""
        return MIGRATES.format(**self.numbers)


@runtime_checkable
class Rebalances(Protocol):
    """A policy that migrates running turns."""

    def rebalance(self, running: Iterable[Running], board: Board, now: float) -> Sequence[TurnMigration]:
        """Turns to interrupt now; each is offered to `Policy.route` again when its engine has returned it."""


class OpenTrajectory:
    """A trajectory as `moves` sees it; ``generated`` is 0 while its tool runs."""

    def __init__(self, name: str, turns: int, engine: str, left: float, context: float, generated: float) -> None:
        self.name, self.turns, self.engine = name, turns, engine
        self.left, self.context, self.generated = left, context, generated


class _Load:
    """Contexts of an engine's residents, and the sum of the fourth powers of what they have left."""

    def __init__(self, view: EngineView) -> None:
        self.view = view
        self.context = self.left4 = 0.0

    def add(self, trajectory: OpenTrajectory, sign: float = 1.0) -> None:
        self.context = max(0.0, self.context + sign * trajectory.context)
        self.left4 = max(0.0, self.left4 + sign * trajectory.left**4)

    def step_s(self, more: float = 0.0) -> float:
        return self.view.base_s + self.view.slope_s * max(0.0, self.context + more)


def choose_moves(board: Board, trajectories: Iterable[OpenTrajectory]) -> list[TurnMigration]:
    """The moves to make now, best first; each is chosen as if those before it were done."""
    loads = {name: _Load(view) for name, view in board.engines.items()}
    placed = [trajectory for trajectory in trajectories if trajectory.engine in loads]
    for trajectory in placed:
        loads[trajectory.engine].add(trajectory)
    movable = [trajectory for trajectory in placed if trajectory.generated > 0.0]
    found: list[TurnMigration] = []
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
    """Return, for each TP class, the own engine with the shortest step among those that would start a turn at once."""
    able = (
        [loads[view.engine] for view in tp_class.members if view.free and not view.waiting and not view.borrowed]
        for tp_class in board.classes
    )
    return [min(some, key=_Load.step_s) for some in able if some]


def _gain(trajectory: OpenTrajectory, source: _Load, target: _Load) -> float:
    """By how much the late finish falls, seconds to the fourth; 0.0 when a rule forbids the move."""
    if target is source or target.context + trajectory.context > target.view.kv_capacity:
        return 0.0
    left, context = trajectory.left, trajectory.context
    here, there = source.step_s(), target.step_s(context)
    prefill_s = target.view.prefill_s * context
    own_s = left * there + prefill_s
    if own_s > MAX_TIME_RATIO * left * here or trajectory.generated * (here - there) < MIN_SAVED_PREFILLS * prefill_s:
        return 0.0
    before = here**4 * source.left4 + target.step_s() ** 4 * target.left4
    after = source.step_s(-context) ** 4 * (source.left4 - left**4) + there**4 * target.left4 + own_s**4
    return before - after


def _move_of(trajectory: OpenTrajectory, source: _Load, target: _Load) -> TurnMigration:
    left_s = trajectory.left * source.step_s()
    own_s = trajectory.left * target.step_s(trajectory.context) + target.view.prefill_s * trajectory.context
    numbers: dict[str, float | str] = {
        "remaining": trajectory.left,
        "generated": trajectory.generated,
        "context": trajectory.context,
        "left_s": left_s,
        "saves_s": left_s - own_s,
        "source": source.view.engine,
        "engine": target.view.engine,
    }
    return TurnMigration(
        trajectory=trajectory.name,
        turns=trajectory.turns,
        source=source.view.engine,
        target=target.view.engine,
        numbers=numbers,
    )
