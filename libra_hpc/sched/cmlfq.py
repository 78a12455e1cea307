"""C-MLFQ: a multi-level feedback queue whose feedback is causal (what the prompt, the siblings and the tools said), not
only how long a trajectory has run.

Levels are the TP classes of the engines present, ascending: level 0 has the most replicas and the slowest single
sequence.  What a trajectory has left and what it may *reach* come from the causal tree (`tree`), what an engine's steps
cost at its load from its reports (`costs`).

**Where a turn goes.**  A batch ends with its last trajectory, so the aim is a short makespan, not a short turn.  Every
engine is credited with the work of the trajectories that sit there (`loads`), which gives the second at which it would
finish.  A turn goes where it adds least to

    sum over engines of finish ** 4,

a smooth stand-in for the latest finish: the fourth power makes an engine that ends late 16 times dearer than one that
ends at half that time, yet still tells apart two that end early.  Consequences, none of which needs a rule of its own:
a long trajectory goes to a fast class, on which its own steps end sooner; a short one fills a slow engine rather than
delay a long one's; work spreads in proportion to speed; an idle fast engine draws work from crowded slow ones; and when
little is left, the longest ones move to idle fast engines.  Own seconds times `OWN` = 0.02 of the dearest engine's
slope break ties between placements that do not matter.

**Moving.**  The engine of the last turn has the prefix cached (unless its weights changed since), every other one
prefills the context again; that is part of its finish.  A trajectory moves, in a tool gap only, when staying adds more
than `MOVE_MARGIN` = 3 times as much, because what is left is only an estimate.  On simulated batches of 512
trajectories (48 A800, three kinds of work, eight seeds each) margins of 2 and 3 were equally fast on average, the
latter with a third fewer moves; 6 was slower by 2, 2 and 6 %.  When the engine of the last turn is full but would win
by the same margin, the turn waits for a slot there, a matter of seconds, rather than prefill elsewhere.

**Starting beside a sibling.**  The samples of a prompt share it, and an engine that has computed it for one of them
finds it cached for the next.  So the engine of the sibling that started last is asked too, without the price of the
prompt.  Siblings are long together, which the sum above does not know, so it must add `NEAR_MARGIN` = 0.8 times as much
as any other at most.

A turn so long that no gap comes may be moved while it runs (`turn_migration`); where it goes on was then decided before
it was interrupted.

**Who goes first.**  A turn ready at time t counts as ready at t - credit, in the queue and as the engine's priority.
The credit is `AGEING_S` = 300 s for the first sibling of a group (the probe: the sooner it runs, the sooner the group
is known); for others r / (r + m) of the same, r being expected left tokens and m the mean total, longest first; turns
after the first get at least half, because their cache is warm.  As 0 <= credit <= `AGEING_S`, no turn is overtaken by
one that became ready `AGEING_S` or more after it: that is the bound on starvation.

**Keeping caches.**  `keep_s` follows from the measured durations of the trajectory's last tool (`ttl`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import inf
from typing import Final, cast

from msgspec.structs import astuple

from libra_hpc.protocol.env import Signal

from .board import Board, EngineView
from .engine_loads import EngineLoad, EngineLoads, Resident
from .protocol import Decision, Finished, TurnView
from .remaining_work import Cursor, RemainingWorkEstimator
from .ttl import KeepTimes
from .turn_migration import MAX_OPEN_PER_ENGINE, MIGRATES, Move, OpenTrajectory, Running, choose_moves

MOVE_MARGIN: Final = 3.0
TIE_BREAK: Final = 0.02
SIBLING_MARGIN: Final = 0.8
AGEING_S: Final = 300.0
MIN_LATER_SHARE: Final = 0.5
"""Part of `AGEING_S` that turns after the first have for certain."""
PRIORITIES_PER_S: Final = 10
"""Grain of the engine's integer priority: 0.1 s of virtual time."""
MAX_TRACKED: Final = 65_536
"""Trajectories remembered at once; more than any gate lets be open, so only abandoned ones are ever forgotten."""
TOOLS_LEARNED: Final = 4
"""Tool durations learned from a finished trajectory, its last ones."""

STARTS: Final = "start: {engine} then finishes in {finish_s:.1f} s, with {remaining:.0f} tokens expected of this one"
STARTS_AT_SIBLING: Final = (
    "start: {engine} has the prompt cached for a sibling and then finishes in {finish_s:.1f} s, with {remaining:.0f}"
    " tokens expected of this one"
)
STAYS: Final = "stay: with it {engine} finishes in {finish_s:.1f} s; {remaining:.0f} tokens expected of this one"
MOVES: Final = (
    "move: {engine} adds {ratio:.1f} times less to the late finish than staying, though the context is prefilled again;"
    " {remaining:.0f} tokens expected"
)
LEAVES: Final = (
    "move: the last engine is gone, full or under new weights; {engine} finishes in {finish_s:.1f} s; {remaining:.0f}"
    " tokens expected"
)
WAITS_FOR_CACHE: Final = "wait: {wanted} is full, but has the context cached; {remaining:.0f} tokens expected"
WAITS: Final = "wait: no engine has a free slot; {remaining:.0f} tokens expected"


_Fields = tuple[str, str, int, str, int, int, int, float, str, tuple[Signal, ...], int]
"""Of a `TurnView`, in their order."""


class _Tracked(Resident):
    """A running trajectory."""

    __slots__ = ("cursor", "migration", "priority", "prompt_id", "version")

    def __init__(self, cursor: Cursor, prompt_id: str) -> None:
        super().__init__()
        self.cursor, self.prompt_id = cursor, prompt_id
        self.priority = 0
        """Of its next turn."""
        self.version = -1
        """Weights of the engine of its last turn, when it was sent there."""
        self.migration: Move | None = None
        """Where its interrupted turn goes on."""


class CausalMlfq:
    """See the module.  ``tree`` may be one that has learned already (warm start)."""

    name = "cmlfq"

    def __init__(self, estimator: RemainingWorkEstimator | None = None) -> None:
        self.estimator = estimator if estimator is not None else RemainingWorkEstimator()
        self.keep_times = KeepTimes()
        self._loads = EngineLoads()
        self._tracked: dict[str, _Tracked] = {}
        """Oldest first."""
        self._started: dict[str, _Tracked] = {}
        """By prompt, the sibling that started last."""

    def key(self, turn: TurnView, now: float) -> float:
        """Virtual time: when it became ready, less its credit."""
        # In compiled code all fields at once cost less than two of them.
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
        return key

    def route(self, turn: TurnView, board: Board, now: float) -> Decision:
        """Choose the engine at which the trajectory adds least to the late finish, or wait for the one that has its
        context cached."""
        tracked = self._tracked.get(turn.trajectory)
        if tracked is None:
            self.key(turn, now)
            tracked = self._tracked[turn.trajectory]
        if (move := tracked.migration) is not None and (decision := self._migrate(tracked, move, turn, board)):
            return decision
        loads, cursor, context, load_before, last = (
            self._loads,
            tracked.cursor,
            turn.context_tokens,
            tracked.load,
            turn.engine,
        )
        if board.generation != loads.generation:
            loads.sync(board)
        reach, work = cursor.reach, cursor.work(context)
        if load_before is not None:
            load_before.remove(tracked)
        # The engine of the last turn.
        last_load, full, limit = loads.get(last), False, inf
        prefill_cached, prefill_uncached = cursor.future, context + cursor.future
        if last_load is not None:
            view = last_load.view
            if view.open and view.version == tracked.version and view.kv_capacity >= context:
                if turn.signals:
                    prefill_cached += turn.signals[-1].payload_tokens
                stay_finish = last_load.finish_with(reach, work, prefill_cached)
                limit = _added(last_load.finish, stay_finish) / MOVE_MARGIN
                full = view.inflight >= view.cap
            else:
                last_load = None
        # Another one only if it adds less than the limit; a turn has to go somewhere unless its engine is free.
        best: EngineLoad | None = None
        best_add = inf if full else limit
        best_finish = 0.0
        for tp_class in board.classes:
            load = loads.first_to_finish(tp_class)
            if load is None or load is last_load or (load.kv_capacity < context and self._fits(board, context)):
                continue
            alone = load.finish
            # Its steps will be no fewer, so the time of the tokens alone tells most of those that cannot win.
            if _added(alone, alone + tp_class.slope_s * work + tp_class.prefill_s * prefill_uncached) < best_add:
                finish = load.finish_with(reach, work, prefill_uncached)
                add = _added(alone, finish) + TIE_BREAK * (finish - alone)
                if add < best_add:
                    best, best_add, best_finish = load, add, finish
        starts, shared = not turn.attained_tokens, False
        if starts and (sibling := self._sibling_load(turn.prompt_id)) is not None:
            finish = sibling.finish_with(reach, work, cursor.future)
            add = _added(sibling.finish, finish) + TIE_BREAK * (finish - sibling.finish)
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
            return self._wait(tracked, load_before, None)
        load.add(tracked, reach, work, prefill, finish)
        if load_before is not None:
            loads.update_entry(load_before)
        if starts:
            self._started[turn.prompt_id] = tracked
        view = load.view
        numbers["finish_s"], numbers["engine"] = finish, view.engine
        return self._send(tracked, view, template, numbers)

    def rebalance(self, running: Iterable[Running], board: Board, now: float) -> list[Move]:
        """Running turns that should go on elsewhere; each is placed there at once."""
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
                turn.trajectory, turn.turns, turn.engine, cursor.left, context, generated
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
        """Teach the tree, forget the trajectory."""
        tracked = self._tracked.pop(record.trajectory, None)
        if tracked is None:
            self.estimator.insert(record)
        else:
            self._end(tracked)
            self.estimator.finish(tracked.cursor, record)
        for signal in record.signals[-TOOLS_LEARNED:]:
            self.keep_times.learn(signal.tool, signal.seconds)

    def forget(self, trajectory: str) -> None:
        """A trajectory was given up: its place is free."""
        tracked = self._tracked.pop(trajectory, None)
        if tracked is not None:
            self._end(tracked)
            self.estimator.drop(tracked.cursor)

    def _track(self, turn: TurnView) -> _Tracked:
        tracked = self._tracked[turn.trajectory] = _Tracked(
            self.estimator.cursor(turn.prompt_id, turn.task), turn.prompt_id
        )
        if len(self._tracked) > MAX_TRACKED:
            self.forget(next(iter(self._tracked)))
        return tracked

    def _end(self, tracked: _Tracked) -> None:
        self._remove_load(tracked)
        if self._started.get(tracked.prompt_id) is tracked:
            del self._started[tracked.prompt_id]

    def _remove_load(self, tracked: _Tracked) -> None:
        load = tracked.load
        if load is not None:
            load.remove(tracked)
            self._loads.update_entry(load)

    def _migrate(self, tracked: _Tracked, move: Move, turn: TurnView, board: Board) -> Decision | None:
        """Send an interrupted turn where it was to go; None when it ended by itself, or when that engine takes no
        turn any more."""
        tracked.migration = None
        view = board.engines.get(move.target)
        if (
            turn.turns != move.turns
            or view is None
            or not view.free
            or tracked.load is None
            or tracked.load.view is not view
        ):
            return None
        return self._send(tracked, view, MIGRATES, move.numbers)

    def _sibling_load(self, prompt_id: str) -> EngineLoad | None:
        """The engine that has a prompt cached because the sibling that started last sits there, if it has a free
        slot."""
        sibling = self._started.get(prompt_id)
        if sibling is None or sibling.load is None:
            return None
        load, view = sibling.load, sibling.load.view
        return load if view.free and view.version == sibling.version and self._loads.get(view.engine) is load else None

    def _send(self, tracked: _Tracked, view: EngineView, template: str, numbers: Mapping[str, float | str]) -> Decision:
        tracked.version = view.version
        tp_class = view.tp_class
        keep_s = self.keep_times.keep_s(tracked.cursor.last[0], tp_class.tp, tp_class.prefill_s, view.kv_capacity)
        return Decision(view.engine, tracked.priority, view.level, template, numbers, keep_s)

    def _wait(self, tracked: _Tracked, load_before: EngineLoad | None, wanted: EngineLoad | None) -> Decision:
        """It keeps its load while it waits."""
        left, priority = tracked.cursor.left, tracked.priority
        if load_before is not None:
            load_before.add(
                tracked,
                tracked.reach,
                tracked.work,
                tracked.prefill,
                load_before.finish_with(tracked.reach, tracked.work, tracked.prefill),
            )
        if wanted is None:
            return Decision("", priority, 0, WAITS, {"remaining": left})
        name = wanted.view.engine
        return Decision(
            "", priority, wanted.view.level, WAITS_FOR_CACHE, {"remaining": left, "wanted": name}, 0.0, "engine", name
        )

    @staticmethod
    def _fits(board: Board, context: int) -> bool:
        """Whether any engine can hold a context; one that none can hold is for the engine to refuse: waiting would
        be for ever."""
        return any(view.kv_capacity >= context for view in board.engines.values())


def _added(before: float, after: float) -> float:
    """after ** 4 - before ** 4."""
    a, b = after * after, before * before
    return a * a - b * b
