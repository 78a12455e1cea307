"""C-MLFQ: a multi-level feedback queue whose feedback is causal: prompt, siblings and tool results, not only run time.

A level is one TP class of the engines present.  Estimates: `remaining_work`; step costs: `costs`.  Where the contexts
exceed the KV caches, `residency` decides which trajectories keep theirs and which wait.

- A turn is ready -> the engine where it adds least to ``sum over engines of finish ** 4`` (`engine_loads`).  The sum
  stands for the makespan: it sends long trajectories to fast engines and fills slow engines with short ones.
- The prefix is cached at the last engine -> the trajectory stays, unless staying adds `MOVE_MARGIN` times more.
- That engine is full and would win by the same margin -> the turn waits for it, at most `AGEING_S`.
- An engine is borrowed -> steps take 1 / share of the time.  If the trajectory must leave (`availability`), its
  prefill and the rest of its work are added at an own engine.
- First turn -> also the engine of the sibling that started last, whose cache holds the prompt (`SIBLING_MARGIN`).
- A long turn shares its engine in the tail of a batch -> it may migrate while it runs (`turn_migration`).
- Order of the queue: ready time minus a credit of 0 to `AGEING_S`.  The first sibling of a group gets all of it.
  Others get r / (r + m) of it, with r expected tokens left and m the mean total; later turns get more than half.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import inf
from typing import Final, cast

from msgspec.structs import astuple

from libra_hpc.policies.scheduling.board import Board
from libra_hpc.policies.scheduling.engine_loads import EngineLoads, EngineWork, Placed, added
from libra_hpc.policies.scheduling.protocol import Decision, Finished, TurnView
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

from .cmlfq_reasons import LEAVES, MOVES, NO_ROOM, STARTS, STARTS_AT_SIBLING, STAYS, WAITS, WAITS_FOR_CACHE
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
MAX_TRACKED: Final = 65_536
"""Open trajectories; more than any staleness gate admits, so only abandoned ones are dropped."""


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


class CausalMlfq:
    """The policy `cmlfq`; an ``estimator`` that has learned already is a warm start."""

    name = "cmlfq"

    def __init__(self, estimator: RemainingWorkEstimator | None = None) -> None:
        self.estimator = estimator if estimator is not None else RemainingWorkEstimator()
        self._loads = EngineLoads()
        self._tracked: dict[str, _Tracked] = {}
        """By name, oldest first."""
        self._started: dict[str, _Tracked] = {}
        """By prompt: the sibling that started last."""

    def key(self, turn: TurnView, now: float) -> float:
        """See `Policy.key`: the time it became ready, minus its credit."""
        # Compiled code reads all fields at once faster than two of them.
        name, _, sample, _, context, attained, turns, ready_at, _, signals, limit = cast(_Fields, astuple(turn))
        tracked = self._tracked.get(name)
        if tracked is None:
            tracked = self._track(turn)
        room = float(limit - context) if limit else inf
        left = self.estimator.advance(tracked.cursor, signals, attained, room)
        share = left / (left + self.estimator.everything.tables[0].rest[0])
        # The probe of a group is the first turn of its first sibling.
        first = share if sample else 1.0
        credit = AGEING_S * (MIN_LATER_SHARE + (1.0 - MIN_LATER_SHARE) * share if turns else first)
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
        loads, load_before = self._loads, tracked.load
        cursor, context, last = tracked.cursor, turn.context_tokens, turn.engine
        if board.generation != loads.generation:
            loads.sync(board)
        reach, work = cursor.reach, cursor.work(context)
        if load_before is not None:
            load_before.remove(tracked)
        last_load, full, limit = loads.get(last), False, inf
        claim, roomless = tracked.claim, False
        if claim.cache is not None:
            if last_load is not None and last_load.cache is claim.cache:
                claim.cache.hold(claim, context)
            if last_load is None or last_load.cache is not claim.cache or not claim.cache.fits(claim):
                release(claim)
        if claim.cache is None and claim.key > board.room_key:
            return self._wait(tracked, load_before, None, roomless=True)
        prefill_cached, prefill_uncached = cursor.future, context + cursor.future
        if last_load is not None:
            view = last_load.view
            if not last_load.cache.has_room(claim, context):
                last_load, roomless = None, True
            elif view.open and view.version == tracked.version and view.kv_capacity >= context:
                if turn.signals:
                    prefill_cached += turn.signals[-1].payload_tokens
                stay_finish = last_load.finish_with(reach, work, prefill_cached)
                limit = self._added_at(last_load, cursor, context, finish=stay_finish) / MOVE_MARGIN
                full = view.inflight >= view.cap
            else:
                last_load = None
        # Another engine must add less than the limit, unless the last one cannot take the turn.
        best: EngineWork | None = None
        best_add = inf if full else limit
        best_finish = 0.0
        for alike in loads.alike:
            load = loads.first_to_finish(alike)
            if load is not None and not load.cache.has_room(claim, context):
                load, roomless = loads.first_with_room(alike, claim, context), True
            if load is None or load is last_load or (load.kv_capacity < context and self._fits(board, context)):
                continue
            alone, view = load.finish, load.view
            # A lower bound of what it adds, without the steps, excludes most engines cheaply.
            if added(alone, alone + view.slope_s * work + view.prefill_s * prefill_uncached) < best_add:
                finish = load.finish_with(reach, work, prefill_uncached)
                add = added(alone, finish)
                if add < best_add:
                    best, best_add, best_finish = load, add, finish
        if loads.borrowed and (lent := self._borrowed(tracked, context, last_load, best_add)) is not None:
            best, best_add, best_finish = lent
        starts, shared = not turn.attained_tokens, False
        if starts and (sibling := self._sibling_load(turn.prompt_id, claim, context)) is not None:
            finish = sibling.finish_with(reach, work, cursor.future)
            add = self._added_at(sibling, cursor, context, finish=finish)
            if add < best_add * SIBLING_MARGIN:
                best, best_add, best_finish, shared = sibling, add, finish, True
        if full and best_add >= limit and now - turn.ready_at < AGEING_S:
            return self._wait(tracked, load_before, last_load)
        numbers: dict[str, float | str] = {"remaining": cursor.left, "own": cursor.prompt.finished}
        if best is not None:
            load, finish, prefill, template = best, best_finish, prefill_uncached, MOVES
            if shared:
                prefill, template = cursor.future, STARTS_AT_SIBLING
            elif last_load is None or full:
                template = LEAVES if last else STARTS
            else:
                numbers["ratio"] = limit * MOVE_MARGIN / best_add
        elif last_load is not None and not full:
            load, finish, prefill, template = last_load, stay_finish, prefill_cached, STAYS
        else:
            return self._wait(tracked, load_before, None, roomless=roomless and claim.cache is None)
        load.add(tracked, reach=reach, work=work, prefill=prefill, finish=finish)
        if load_before is not None:
            loads.update_entry(load_before)
        if starts:
            self._started[turn.prompt_id] = tracked
        numbers["finish_s"], numbers["engine"] = finish, load.view.engine
        return self._send(tracked, load, template, numbers, context)

    def rebalance(self, running: Iterable[Running], board: Board, now: float) -> list[TurnMigration]:
        """See `Rebalances.rebalance`: each move counts at its target at once."""
        if len(self._tracked) > MAX_OPEN_PER_ENGINE * len(board.engines):
            return []
        loads = self._loads
        if board.generation != loads.generation:
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
            cursors[turn.trajectory] = cursor = self.estimator.peek(
                tracked.cursor, turn.signals, turn.attained_tokens + generated, room
            )
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
            reach, work = cursor.reach, cursor.work(prefill)
            self._remove_load(moved)
            finish = target.finish_with(reach, work, prefill)
            target.add(moved, reach=reach, work=work, prefill=prefill, finish=finish)
            moved.migration = move
        return found

    def finished(self, record: Finished, now: float) -> None:
        """See `Policy.finished`: the estimator learns."""
        tracked = self._tracked.pop(record.trajectory, None)
        if tracked is None:
            self.estimator.insert(record)
        else:
            self._end(tracked)
            self.estimator.finish(tracked.cursor, record)

    def forget(self, trajectory: str) -> None:
        """See `Policy.forget`."""
        tracked = self._tracked.pop(trajectory, None)
        if tracked is not None:
            self._end(tracked)
            self.estimator.drop(tracked.cursor)

    def _track(self, turn: TurnView) -> _Tracked:
        tracked = self._tracked[turn.trajectory] = _Tracked(self.estimator.cursor(turn.prompt_id, turn.task), turn)
        if len(self._tracked) > MAX_TRACKED:
            self.forget(next(iter(self._tracked)))
        return tracked

    def _end(self, tracked: _Tracked) -> None:
        release(tracked.claim)
        self._remove_load(tracked)
        if self._started.get(tracked.prompt_id) is tracked:
            del self._started[tracked.prompt_id]

    def _remove_load(self, tracked: _Tracked) -> None:
        load = tracked.load
        if load is not None:
            load.remove(tracked)
            self._loads.update_entry(load)

    def _migrate(self, tracked: _Tracked, move: TurnMigration, turn: TurnView, board: Board) -> Decision | None:
        """Send an interrupted turn to its target; None if it ended by itself, or if the target takes no turn."""
        tracked.migration = None
        view, load = board.engines.get(move.target), tracked.load
        if turn.turns != move.turns or view is None or not view.free or load is None or load.view is not view:
            return None
        return self._send(tracked, load, MIGRATES, move.numbers, turn.context_tokens)

    def _borrowed(
        self, tracked: _Tracked, context: int, last: EngineWork | None, limit: float
    ) -> tuple[EngineWork, float, float] | None:
        """The borrowed engine where the trajectory adds least, if that is below ``limit``; what it adds; its finish."""
        best: tuple[EngineWork, float, float] | None = None
        loads, cursor, claim = self._loads, tracked.cursor, tracked.claim
        reach, work, prefill = cursor.reach, cursor.work(context), context + cursor.future
        for alike in loads.borrowed:
            load = loads.first_to_finish(alike)
            if load is not None and not load.cache.has_room(claim, context):
                load = loads.first_with_room(alike, claim, context)
            if load is not None and load is not last and load.kv_capacity >= context:
                finish = load.finish_with(reach, work, prefill)
                add = self._added_at(load, cursor, context, finish=finish)
                if add < limit:
                    best, limit = (load, add, finish), add
        return best

    def _added_at(self, load: EngineWork, cursor: Cursor, context: int, *, finish: float) -> float:
        """What it adds at an engine; if that is borrowed, also at the own one to which it may have to go."""
        elsewhere = self._loads.elsewhere() if load.view.borrowed else None
        if elsewhere is None:
            return added(load.finish, finish)
        moved = elsewhere.finish_with(cursor.reach, cursor.work(context), context + cursor.future)
        return load.expected(elsewhere, left=cursor.left, context=context, alone=finish, moved=moved)

    def _sibling_load(self, prompt_id: str, claim: Claim, context: int) -> EngineWork | None:
        """The engine that has the prompt cached for the sibling that started last, if it has a free slot and room."""
        sibling = self._started.get(prompt_id)
        if sibling is None or sibling.load is None:
            return None
        load, view = sibling.load, sibling.load.view
        if not view.free or view.version != sibling.version or self._loads.get(view.engine) is not load:
            return None
        return load if load.cache.has_room(claim, context) else None

    def _send(
        self, tracked: _Tracked, load: EngineWork, template: str, numbers: Mapping[str, float | str], context: int
    ) -> Decision:
        view = load.view
        tracked.version, tracked.claim.running = view.version, True
        load.cache.hold(tracked.claim, context)
        return Decision(
            engine=view.engine, priority=tracked.priority, level=view.level, template=template, numbers=numbers
        )

    def _wait(
        self, tracked: _Tracked, load_before: EngineWork | None, wanted: EngineWork | None, roomless: bool = False
    ) -> Decision:
        """Let the turn wait; it stays in the load of its last engine."""
        left, priority = tracked.cursor.left, tracked.priority
        if load_before is not None:
            reach, work, prefill = tracked.reach, tracked.work, tracked.prefill
            finish = load_before.finish_with(reach, work, prefill)
            load_before.add(tracked, reach=reach, work=work, prefill=prefill, finish=finish)
        if roomless:
            return Decision(
                engine="", priority=priority, level=0, template=NO_ROOM, numbers={"remaining": left}, wait="room"
            )
        if wanted is None:
            return Decision(engine="", priority=priority, level=0, template=WAITS, numbers={"remaining": left})
        name = wanted.view.engine
        return Decision(
            engine="",
            priority=priority,
            level=wanted.view.level,
            template=WAITS_FOR_CACHE,
            numbers={"remaining": left, "wanted": name},
            wait="engine",
            wanted=name,
        )

    @staticmethod
    def _fits(board: Board, context: int) -> bool:
        """Whether any engine can hold the context; if none can, an engine must refuse the turn."""
        return any(view.kv_capacity >= context for view in board.engines.values())
