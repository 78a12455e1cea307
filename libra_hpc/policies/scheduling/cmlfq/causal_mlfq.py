"""C-MLFQ: a multi-level feedback queue whose feedback is causal: task, siblings and work done, not only run time.

A level is one TP class of the engines present.  Estimates: `remaining_work`; step costs: `costs`.  Where the contexts
exceed the KV caches, `residency` decides which trajectories keep theirs and which wait.

- A turn is ready -> the engine where it adds least to ``sum over engines of finish ** 4`` (`engine_loads`).  The sum
  stands for the makespan: it sends long trajectories to fast engines and fills slow engines with short ones.
- The prefix is cached at the last engine -> the trajectory stays, unless staying adds `MOVE_MARGIN` times more.
- Its last engine is full -> it waits there, unless staying adds `MOVE_MARGIN` times more than an engine with a slot.
- An engine is borrowed -> steps take 1 / share of the time.  If the trajectory must leave (`availability`), its
  prefill and the rest of its work are added at an own engine.
- First turn -> also the engine of the sibling that started last, whose cache holds the prompt (`SIBLING_MARGIN`).
- A long turn shares its engine in the tail of a batch -> it may migrate while it runs (`turn_migration`).
- Order of the queue: ready time minus a credit of 0 to `AGEING_S`: r / (r + m) of it, with r expected tokens left and
  m the mean total; later turns get more than half.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import inf
from typing import Final, cast

from msgspec.structs import astuple

from libra_hpc.policies.scheduling.board import Board
from libra_hpc.policies.scheduling.engine_loads import EngineLoads, EngineWork, Placed, added
from libra_hpc.policies.scheduling.protocol import Decision, Finished, TurnView, Wait
from libra_hpc.policies.scheduling.residency import Claim, release
from libra_hpc.policies.scheduling.turn_migration import (
    MAX_OPEN_PER_ENGINE,
    MIGRATES,
    OpenTrajectory,
    Running,
    TurnMigration,
    choose_moves,
)
from libra_hpc.protocol.env import Signal

from .cmlfq_reasons import LEAVES, MOVES, NO_ROOM, STARTS, STARTS_AT_SIBLING, STAYS, WAITS, WAITS_FOR_LAST
from .remaining_work import Cursor, RemainingWorkEstimator

MOVE_MARGIN: Final = 3.0
"""A ratio, because remaining work is an estimate: 2 is as fast with half as many moves again, 6 is 2 to 6 % slower."""
SIBLING_MARGIN: Final = 0.8
"""A ratio below 1: siblings tend to be long together, which the sum of finishes does not contain."""
AGEING_S: Final = 300.0
"""Seconds: no turn is overtaken by one that became ready this much later, so none starves."""
MIN_LATER_SHARE: Final = 0.5
"""Least share of the credit for turns after the first, because their cache is warm."""
PRIORITIES_PER_S: Final = 10
"""Engine priorities are integers: one is 0.1 s of virtual time."""

_Fields = tuple[str, str, int, str, int, int, int, float, str, tuple[Signal, ...], int]
"""Types of the fields of a `TurnView`, in order."""


class _Tracked(Placed):
    """An open trajectory, its place in the engine loads, and its room in a KV cache."""

    def __init__(self, cursor: Cursor, turn: TurnView) -> None:
        super().__init__()
        self.cursor, self.prompt_id = cursor, turn.prompt_id
        self.claim = Claim(turn.prompt_id, 0 if turn.turns else turn.context_tokens)
        self.priority = 0
        """Engine priority of its next turn."""
        self.version = -1
        """Weight version at its last engine when its last turn was sent."""
        self.migration: TurnMigration | None = None
        """The move of its interrupted turn."""


class _Choice:
    """The engine that a turn gets, as far as it is decided."""

    def __init__(self, cursor: Cursor, context: int) -> None:
        self.cursor, self.context = cursor, context
        self.work = cursor.work(context)
        self.load: EngineWork | None = None
        self.limit = inf
        """What the trajectory must add less than at another engine."""
        self.stay = 0.0
        """What it adds at its last engine, if it can stay there."""
        self.finish = self.prefill = 0.0
        self.template = ""

    def take(self, load: EngineWork, add: float, finish: float, prefill: float, template: str) -> None:
        """This engine, where the trajectory adds so much."""
        self.load, self.limit, self.finish, self.prefill, self.template = load, add, finish, prefill, template

    def numbers(self) -> dict[str, float | str]:
        """Return the numbers of the reason: what the expected tokens consist of, and the engine."""
        cursor, load = self.cursor, self.load
        found: dict[str, float | str] = {
            "remaining": cursor.left,
            "total": cursor.total,
            "siblings": cursor.prompt.count,
            "finish_s": self.finish,
            "engine": load.view.engine if load is not None else "",
        }
        if self.template == MOVES:
            found["ratio"] = self.stay / self.limit
        return found


class CausalMlfq:
    """The policy `cmlfq`; an ``estimator`` that has learned already is a warm start."""

    name = "cmlfq"

    def __init__(self, estimator: RemainingWorkEstimator | None = None) -> None:
        self.estimator = estimator if estimator is not None else RemainingWorkEstimator()
        self._loads = EngineLoads()
        self._tracked: dict[str, _Tracked] = {}
        """Open trajectories by name."""
        self._started: dict[str, _Tracked] = {}
        """By prompt: the sibling that started last."""

    def key(self, turn: TurnView, now: float) -> float:
        """See `Policy.key`: the time it became ready, minus its credit."""
        # Compiled code reads all fields at once faster than two of them.
        name, prompt_id, _, task, context, attained, turns, ready_at, _, _, limit = cast(_Fields, astuple(turn))
        tracked = self._tracked.get(name)
        if tracked is None:
            tracked = self._tracked[name] = _Tracked(self.estimator.cursor(prompt_id, task, context), turn)
        room = float(limit - context) if limit else inf
        left = tracked.cursor.advance(attained, context, room)
        share = left / (left + tracked.cursor.mean)
        credit = AGEING_S * (MIN_LATER_SHARE + (1.0 - MIN_LATER_SHARE) * share if turns else share)
        key = ready_at - credit
        tracked.priority = int(key * PRIORITIES_PER_S)
        tracked.claim.key, tracked.claim.running = key, False
        return key

    def route(self, turn: TurnView, board: Board, now: float) -> Decision:
        """See `Policy.route`: the engine where the trajectory adds least to the late finish."""
        tracked = self._tracked.get(turn.trajectory)
        if tracked is None:
            self.key(turn, now)
            tracked = self._tracked[turn.trajectory]
        if (move := tracked.migration) is not None and (decision := self._migrate(tracked, move, turn, board)):
            return decision
        loads, load_before, context = self._loads, tracked.load, turn.context_tokens
        loads.sync(board)
        tracked.leave()
        last, claim = loads.get(turn.engine), tracked.claim
        self._keep_room(claim, last, context)
        choice = _Choice(tracked.cursor, context)
        if claim.cache is not None or claim.key <= board.room_key:
            if last is not None:
                self._offer_last(choice, turn, tracked, last)
            self._offer_others(choice, claim, board, LEAVES if turn.engine else STARTS)
            if not turn.attained_tokens:
                self._offer_sibling(choice, turn.prompt_id, claim)
        load = choice.load
        if load is None or not load.view.free:
            return self._wait(choice, tracked, load_before, board.room_key)
        load.add(tracked, choice.cursor.reach, choice.work, choice.prefill)
        if not turn.attained_tokens:
            self._started[turn.prompt_id] = tracked
        return self._send(tracked, load, choice.template, choice.numbers(), context)

    def rebalance(self, running: Iterable[Running], board: Board, now: float) -> list[TurnMigration]:
        """See `Rebalances.rebalance`: each move counts at its target at once."""
        if len(self._tracked) > MAX_OPEN_PER_ENGINE * len(board.engines):
            return []
        loads = self._loads
        loads.sync(board)
        trajectories: dict[str, OpenTrajectory] = {}
        cursors: dict[str, Cursor] = {}
        for run in running:
            turn, generated = run.turn, run.generated
            tracked = self._tracked.get(turn.trajectory)
            if tracked is None or tracked.migration is not None:
                continue
            context = turn.context_tokens + generated
            room = turn.max_context - context if turn.max_context else inf
            before = tracked.cursor
            cursors[turn.trajectory] = cursor = Cursor(before.task, before.prompt, before.first_context)
            cursor.advance(turn.attained_tokens + generated, context, room)
            trajectories[turn.trajectory] = OpenTrajectory(
                turn.trajectory,
                turns=turn.turns,
                engine=turn.engine,
                left=cursor.left,
                context=context,
                generated=generated,
            )
        for name, tracked in self._tracked.items():
            if name not in trajectories and tracked.load is not None:
                left = max(1.0, tracked.cursor.left)
                engine, mean_context = tracked.load.view.engine, tracked.work / left
                trajectories[name] = OpenTrajectory(
                    name, turns=0, engine=engine, left=left, context=mean_context, generated=0.0
                )
        found = choose_moves(board, trajectories.values())
        for move in found:
            moved, target = self._tracked[move.trajectory], loads.get(move.target)
            assert target is not None
            cursor, prefill = cursors[move.trajectory], trajectories[move.trajectory].context
            moved.leave()
            target.add(moved, cursor.reach, cursor.work(prefill), prefill)
            moved.migration = move
        return found

    def finished(self, record: Finished, now: float) -> None:
        """See `Policy.finished`: the estimator learns."""
        tracked = self._tracked.pop(record.trajectory, None)
        if tracked is None:
            cursor = self.estimator.cursor(record.prompt_id, record.task)
        else:
            cursor = tracked.cursor
            self._end(tracked)
        self.estimator.finish(cursor, max(1, record.generated_tokens))

    def forget(self, trajectory: str) -> None:
        """See `Policy.forget`."""
        tracked = self._tracked.pop(trajectory, None)
        if tracked is not None:
            self._end(tracked)

    def _end(self, tracked: _Tracked) -> None:
        release(tracked.claim)
        tracked.leave()
        if self._started.get(tracked.prompt_id) is tracked:
            del self._started[tracked.prompt_id]

    def _migrate(self, tracked: _Tracked, move: TurnMigration, turn: TurnView, board: Board) -> Decision | None:
        """Send an interrupted turn to its target; None if it ended by itself, or if the target takes no turn."""
        tracked.migration = None
        view, load = board.engines.get(move.target), tracked.load
        if turn.turns != move.turns or view is None or not view.free or load is None or load.view is not view:
            return None
        return self._send(tracked, load, MIGRATES, move.numbers, turn.context_tokens)

    @staticmethod
    def _keep_room(claim: Claim, last: EngineWork | None, context: int) -> None:
        """A resident stays one if its last engine still holds its context, which has grown."""
        if claim.cache is None:
            return
        if last is not None and last.cache is claim.cache:
            last.cache.hold(claim, context)
            if last.cache.fits(claim):
                return
        release(claim)

    def _offer_last(self, choice: _Choice, turn: TurnView, tracked: _Tracked, last: EngineWork) -> None:
        """Offer the engine that has the prefix cached, full or not; others must then add `MOVE_MARGIN` times less."""
        view, context = last.view, choice.context
        if not view.open or view.version != tracked.version or view.kv_capacity < context:
            return
        if not last.cache.has_room(tracked.claim, context):
            return
        prefill = choice.cursor.future + (turn.signals[-1].payload_tokens if turn.signals else 0)
        self._offer(choice, last, prefill, STAYS, inf)
        choice.stay, choice.limit = choice.limit, choice.limit / MOVE_MARGIN

    def _offer_others(self, choice: _Choice, claim: Claim, board: Board, template: str) -> None:
        """Offer of alike engines the one that finishes first, of those that have room for the context."""
        loads, last, context = self._loads, choice.load, choice.context
        for alike in loads.alike:
            load = loads.first_to_finish(alike, claim, context)
            if load is None or load is last or (load.kv_capacity < context and self._fits(board, context)):
                continue
            self._offer(choice, load, context + choice.cursor.future, template if last is None else MOVES, choice.limit)

    def _offer_sibling(self, choice: _Choice, prompt_id: str, claim: Claim) -> None:
        """Offer the engine that has the prompt cached for the sibling that started last."""
        sibling = self._started.get(prompt_id)
        if sibling is None or sibling.load is None:
            return
        load, view = sibling.load, sibling.load.view
        if not view.free or view.version != sibling.version or self._loads.get(view.engine) is not load:
            return
        if load.cache.has_room(claim, choice.context):
            self._offer(choice, load, choice.cursor.future, STARTS_AT_SIBLING, SIBLING_MARGIN * choice.limit)

    def _offer(self, choice: _Choice, load: EngineWork, prefill: float, template: str, limit: float) -> None:
        """Choose an engine if the trajectory adds less than ``limit`` there.

        If the engine is borrowed, that counts the own one to which it may have to go.
        """
        finish = load.finish_with(choice.cursor.reach, choice.work, prefill)
        elsewhere = self._loads.elsewhere() if load.view.borrowed else None
        if elsewhere is None:
            add = added(load.finish, finish)
        else:
            moved = elsewhere.finish_with(choice.cursor.reach, choice.work, choice.context + choice.cursor.future)
            add = load.expected(elsewhere, left=choice.cursor.left, context=choice.context, alone=finish, moved=moved)
        if add < limit:
            choice.take(load, add, finish, prefill, template)

    def _send(
        self, tracked: _Tracked, load: EngineWork, template: str, numbers: Mapping[str, float | str], context: int
    ) -> Decision:
        view = load.view
        tracked.version, tracked.claim.running = view.version, True
        load.cache.hold(tracked.claim, context)
        return Decision(
            engine=view.engine, priority=tracked.priority, level=view.level, template=template, numbers=numbers
        )

    def _wait(self, choice: _Choice, tracked: _Tracked, load_before: EngineWork | None, room_key: float) -> Decision:
        """Let the turn wait; it stays in the load of its last engine."""
        if load_before is not None:
            load_before.add(tracked, choice.cursor.reach, choice.work, tracked.prefill)
        claim, template = tracked.claim, WAITS
        wait: Wait = "slot"
        if choice.load is not None:
            wait, template = "last", WAITS_FOR_LAST
        elif claim.cache is None and (claim.key > room_key or self._loads.lack_room(claim, choice.context)):
            wait, template = "room", NO_ROOM
        return Decision(
            engine="", priority=tracked.priority, level=0, template=template, numbers=choice.numbers(), wait=wait
        )

    @staticmethod
    def _fits(board: Board, context: int) -> bool:
        """Whether any engine can hold the context; if none can, an engine must refuse the turn."""
        return any(view.kv_capacity >= context for view in board.engines.values())
