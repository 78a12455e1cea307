"""`oracle`: clairvoyant scheduling, the bound the other policies are measured against.

It is told, for every trajectory, what remains to decode, to prefill and to wait for tools (`Foresight.truth`), and how
fast engines of each TP degree are (`Foresight.steps`).  With the model of `drain` it keeps, per engine, the time its
trajectories will have ended:

* Who goes first: longest remaining time first (LPT, within 4/3 - 1/(3m) of the best makespan on m identical machines,
  Graham 1969), in the queue and as the engines' priority.
* Where it starts: the engine that then ends first.  Because step times grow slowly with the batch, long trajectories
  fill the large TP degrees until these end no earlier than a smaller degree would, and the short ones fill the rest.
  The engine at which a sibling started last has the prompt cached, and is priced without it.
* In a tool gap it may move: from engine h to the engine e for which the later end of the two, max(end h, end e), falls
  most.  It prices the context it would compute again, and moves only when that end falls by more than `MARGIN` = 5 %:
  the plan is slightly out of date between two turns of the others, and on simulated workloads margins of 2 % and less
  paid for more moves than they won.  Otherwise it stays, with its prefix.
* A full engine counts like any other (its plan says how long its trajectories take with the slots it has): when it is
  better than every free one by the same margin, the turn waits for it, and is in its plan meanwhile.  The choice is
  made anew when a trajectory has ended.

Among engines of one TP degree only the one that ends first is priced: the rest are the same machine with more work.
The rule is greedy: its makespan is not a proven lower bound, only one that no policy without foresight is expected to
reach.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import msgspec

from libra_hpc.hardware.steps import StepTimes
from libra_hpc.sched.baselines.common import Baseline, eligible, last_engine, wait
from libra_hpc.sched.board import Board, EngineView
from libra_hpc.sched.protocol import Decision, Finished, TurnView
from libra_hpc.simulator.baselines.drain import DrainPlan, Load, prefill_s

MARGIN = 0.05
PRIORITIES_PER_S = 10
"""Grain of the engine's integer priority: 0.1 s of remaining time."""


class OracleWork(msgspec.Struct, frozen=True):
    """What a trajectory still has to do, its present turn included."""

    decode_tokens: int
    fresh_tokens: int
    """Tokens at the end of its present context that no engine has computed: the prompt at admission, later what the
    last tool added."""
    new_tokens: int
    """Tokens the environment will add in later turns."""
    tool_s: float
    """Seconds of the tools it will call."""


class Foresight(NamedTuple):
    """What only a simulator can know."""

    truth: Callable[[str, int], OracleWork]
    """(trajectory, turns done) -> work that remains."""
    steps: Mapping[int, StepTimes]
    """Step times by TP degree."""
    max_num_seqs: int
    """Most sequences an engine runs at once; more may be in flight."""


class _Placed(NamedTuple):
    engine: str
    version: int
    load: Load


class Oracle(Baseline):
    """See the module."""

    name = "oracle"

    def __init__(self, foresight: Foresight) -> None:
        self._truth, self._steps, self._max_num_seqs = foresight
        self._plans: dict[str, DrainPlan] = {}
        self._placed: dict[str, _Placed] = {}
        self._waits: dict[str, tuple[str, int]] = {}
        """Waiting turns: engine, and the number of ends when it was chosen."""
        self._ends = 0
        self._siblings: dict[str, str] = {}
        """By prompt, the trajectory that started last."""

    def key(self, turn: TurnView, now: float) -> float:
        """See `Policy.key`: longest remaining time, at the pace of a lone sequence on the largest TP degree, first."""
        work = self._truth(turn.trajectory, turn.turns)
        steps = self._steps[max(self._steps)]
        pace = steps.step_s(1, turn.context_tokens + work.decode_tokens // 2)
        return -(
            work.decode_tokens * pace
            + prefill_s(steps, work.fresh_tokens + work.new_tokens, turn.context_tokens)
            + work.tool_s
        )

    def route(self, turn: TurnView, board: Board, now: float) -> Decision:
        """See `Policy.route`."""
        priority = round(self.key(turn, now) * PRIORITIES_PER_S)
        name, ends = self._waits.get(turn.trajectory, ("", -1))
        if ends == self._ends and name in board.engines and _full(board.engines[name]):
            return Decision(
                "", priority, board.engines[name].level, "wait: {engine} is full and still the best", {"engine": name}
            )
        options = [
            e
            for e in board.engines.values()
            if e.open and e.kv_capacity >= turn.context_tokens and (e.inflight < e.cap or e.inflight > 0)
        ]
        options = options or eligible(turn, board)
        if not options:
            return wait(board, priority=priority)
        self._follow(board)
        work = self._truth(turn.trajectory, turn.turns)
        placed = self._placed.get(turn.trajectory)
        home = last_engine(turn, options)
        # A weight swap empties the cache of the engine that has the prefix.
        cached = home is not None and placed is not None and placed.version == home.version
        self.forget(turn.trajectory)
        near = None if turn.attained_tokens else self._near(turn.prompt_id, board)
        best, load, gain = self._best(turn, work, home, cached, near, options)
        plan = self._plans[best.engine]
        plan.add(load)
        if not turn.attained_tokens:
            self._siblings[turn.prompt_id] = turn.trajectory
        self._placed[turn.trajectory] = _Placed(best.engine, best.version, load)
        numbers: dict[str, float | str] = {
            "engine": best.engine,
            "end_s": plan.end_s,
            "left": float(work.decode_tokens),
            "gain_s": gain,
        }
        if _full(best):
            self._waits[turn.trajectory] = best.engine, self._ends
            return Decision(
                "",
                priority,
                best.level,
                "wait: {engine} is full and still the best: all there ends in {end_s:.2f} s",
                numbers,
            )
        if best is near:
            reason = "with {left:.0f} tokens left, {engine} ends first, for it has the prompt cached: {end_s:.2f} s"
        elif home is None:
            reason = "with {left:.0f} tokens left, {engine} ends first: {end_s:.2f} s"
        elif best is home:
            reason = "stays on {engine}, which ends in {end_s:.2f} s: no move ends sooner"
        else:
            reason = "moves to {engine}: the later of both ends falls by {gain_s:.2f} s"
        return Decision(best.engine, priority, best.level, reason, numbers)

    def finished(self, record: Finished, now: float) -> None:
        """See `Policy.finished`."""
        self._ends += 1
        super().finished(record, now)

    def forget(self, trajectory: str) -> None:
        """See `Policy.forget`."""
        self._waits.pop(trajectory, None)
        placed = self._placed.pop(trajectory, None)
        if placed is not None and placed.engine in self._plans:
            self._plans[placed.engine].remove(placed.load)

    def _best(
        self,
        turn: TurnView,
        work: OracleWork,
        home: EngineView | None,
        cached: bool,
        near: EngineView | None,
        options: list[EngineView],
    ) -> tuple[EngineView, Load, float]:
        """The engine to be at, the load there, and the seconds the end falls by going there."""
        best, best_load, gain, stay_s = home, None, 0.0, 0.0
        if home is not None:
            best_load = self._load(turn, work, home, cached)
            stay_s = self._plans[home.engine].end_with(best_load)
        free = [e for e in options if not _full(e)]
        nearest = [near] if near in free else []
        for engine in (*nearest, *self._first_of_each_class(free), *self._first_of_each_class(options)):
            if engine is home or engine is best:
                continue
            plan, load = self._plans[engine.engine], self._load(turn, work, engine, engine is near)
            end = plan.end_with(load)
            if home is not None:
                saved = max(stay_s, plan.end_s) - max(self._plans[home.engine].end_s, end)
            else:
                stay_s = stay_s or end
                saved = stay_s - end
            margin = MARGIN * stay_s if home is not None or _full(engine) else 0.0
            if best is None or saved > gain + margin:
                best, best_load, gain = engine, load, saved
        assert best is not None
        assert best_load is not None
        return best, best_load, gain

    def _near(self, prompt_id: str, board: Board) -> EngineView | None:
        """The engine that has the prompt cached because a sibling is placed there."""
        placed = self._placed.get(self._siblings.get(prompt_id, ""))
        if placed is None:
            return None
        engine = board.engines.get(placed.engine)
        return engine if engine is not None and engine.version == placed.version else None

    def _follow(self, board: Board) -> None:
        for name in [name for name in self._plans if name not in board.engines]:
            del self._plans[name]
            for trajectory in [t for t, placed in self._placed.items() if placed.engine == name]:
                del self._placed[trajectory]
        for name, engine in board.engines.items():
            slots = min(engine.cap, self._max_num_seqs)
            plan = self._plans.get(name)
            if plan is None:
                self._plans[name] = DrainPlan(self._steps[engine.tp], slots)
            else:
                plan.resize(slots)

    def _first_of_each_class(self, options: list[EngineView]) -> list[EngineView]:
        first: dict[int, EngineView] = {}
        for engine in options:
            known = first.get(engine.tp)
            if known is None or self._plans[engine.engine].end_s < self._plans[known.engine].end_s:
                first[engine.tp] = engine
        return list(first.values())

    def _load(self, turn: TurnView, work: OracleWork, engine: EngineView, cached: bool) -> Load:
        steps = self._steps[engine.tp]
        fresh = turn.context_tokens
        if cached:
            # At admission it is a sibling's prompt, and nothing of it is new.
            fresh = min(fresh, work.fresh_tokens) if turn.attained_tokens else 0
        later = turn.context_tokens + work.decode_tokens
        prefill = prefill_s(steps, fresh, turn.context_tokens - fresh) + prefill_s(steps, work.new_tokens, later)
        mean = turn.context_tokens + (work.decode_tokens + work.new_tokens) // 2
        return Load(max(1, work.decode_tokens), turn.trajectory, prefill, work.tool_s, mean)


def _full(engine: EngineView) -> bool:
    return not (engine.open and engine.inflight < engine.cap)
