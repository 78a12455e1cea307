"""`oracle`: clairvoyant scheduling, the reference for the other policies.

It runs in the simulator only: its input is the remaining work of every trajectory and the step times (`Foresight`).
`drain_s` predicts when an engine ends its trajectories.

* Queue order and engine priority -> longest remaining time first (LPT, Graham 1969).
* First turn -> the engine that ends first with it.  The engine with the prompt of the latest sibling is priced
  without that prompt.
* Later turn -> the engine for which the later of both ends (old and new engine) falls most, by more than `MARGIN`;
  else the engine of the last turn.
* A full engine is better by `MARGIN` than every free one -> the turn waits for it; reconsidered when a trajectory ends.
* Of each TP degree only the engine that ends first is priced: the others have more work.

The rule is greedy, so its makespan is no proven lower bound.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from libra_hpc.models.step_times.steps import StepTimes
from libra_hpc.policies.scheduling.board import Board, EngineView
from libra_hpc.policies.scheduling.protocol import Decision, Finished, TurnView
from libra_hpc.policies.scheduling.rules.rule import Rule, eligible, last_engine, wait
from libra_hpc.protocol.trace import TrajectoryRecord
from libra_hpc.simulator.settings import EngineSpec, SimulationSettings, trajectory_ids

MARGIN = 0.05
"""Share of the end by which a move or a wait must shorten it.  At 0.02 and less, moves cost more than they gained."""
PRIORITIES_PER_S = 10
"""Steps of the engine's integer priority per second of remaining time."""
REUSE = 0.8
"""A step time is used until the batch has shrunk to this share.

This is exact for the last few trajectories, which decide the end, and costs a logarithmic number of lookups."""
CHUNK = 2_048
"""Prompt tokens priced as one prefill chunk (vLLM's chunked prefill)."""


class OracleWork(msgspec.Struct, frozen=True):
    """Remaining work of a trajectory, its current turn included."""

    decode_tokens: int
    fresh_tokens: int
    """Tokens of its context that no engine has computed: the prompt at admission, later the last tool's answer."""
    new_tokens: int
    """Tokens the environment will add in later turns."""
    tool_s: float


class Foresight(NamedTuple):
    """The future of a workload, which only a simulator has."""

    truth: Callable[[str, int], OracleWork]
    """(trajectory, turns done) -> remaining work."""
    steps: Mapping[int, StepTimes]
    max_num_seqs: int
    """Most sequences an engine runs at once; more may be in flight."""


class Load(NamedTuple):
    """Remaining work of one trajectory at one engine, ordered by tokens to decode."""

    tokens: int
    """Tokens to decode, >= 1."""
    name: str
    prefill_s: float
    tool_s: float
    context: int
    """Mean context over the remaining tokens."""


def prefill_s(steps: StepTimes, tokens: int, context: int) -> float:
    """Seconds that ``tokens`` prompt tokens after ``context`` cached ones add to a decoding engine."""
    if tokens <= 0:
        return 0.0
    chunk = min(tokens, CHUNK)
    middle = context + tokens // 2
    return (steps.step_s(1, middle, chunk, middle) - steps.step_s(1, middle)) * tokens / chunk


def drain_s(loads: Sequence[Load], steps: StepTimes, slots: int) -> float:
    """Seconds until the last of ``loads`` (ascending; none: 0.0) ends at an engine with at most ``slots`` turns.

    All trajectories run side by side, and the batch shrinks whenever the one with the fewest remaining tokens ends.  A
    stage of n tokens between two ends takes

        n * (step_s(batch, KV tokens) * max(1, batch / room) + sum of prefill seconds per token).

    * batch: each trajectory counts by the share of its time outside tools.
    * room: how many fit into slots and KV cache; beyond it trajectories take turns.
    * Prefill is spread evenly over a trajectory's tokens.
    * A trajectory ends with its last stage plus its tool time; the engine ends with its last trajectory.
    """
    if not loads:
        return 0.0
    pace = steps.step_s(len(loads), sum(load.context for load in loads))
    shares = [1.0 if load.tool_s <= 0.0 else load.tokens * pace / (load.tokens * pace + load.tool_s) for load in loads]
    batch = sum(shares)
    kv = sum(share * load.context for share, load in zip(shares, loads, strict=True))
    rate = sum(load.prefill_s / load.tokens for load in loads)
    elapsed = end = priced_s = 0.0
    priced, done = 2.0 * batch / REUSE, 0
    for share, load in zip(shares, loads, strict=True):
        if load.tokens > done:
            if batch <= REUSE * priced:
                room = max(1.0, min(float(slots), steps.kv_capacity * batch / max(kv, 1.0)))
                running = min(batch, room)
                priced_s = steps.step_s(max(1, round(running)), int(kv * running / batch)) * max(1.0, batch / room)
                priced = batch
            elapsed += (load.tokens - done) * (priced_s + rate)
            done = load.tokens
        end = max(end, elapsed + load.tool_s)
        batch = max(batch - share, 1e-9)
        kv = max(kv - share * load.context, 0.0)
        rate = max(rate - load.prefill_s / load.tokens, 0.0)
    return end


class DrainPlan:
    """The trajectories placed at one engine, and when they end."""

    def __init__(self, steps: StepTimes, slots: int) -> None:
        self.steps, self._slots = steps, slots
        self._loads: list[Load] = []
        self._end: float | None = None

    def __len__(self) -> int:
        return len(self._loads)

    @property
    def end_s(self) -> float:
        if self._end is None:
            self._end = drain_s(self._loads, self.steps, self._slots)
        return self._end

    def resize(self, slots: int) -> None:
        if slots != self._slots:
            self._slots, self._end = slots, None

    def end_with(self, load: Load) -> float:
        loads = self._loads.copy()
        insort(loads, load)
        return drain_s(loads, self.steps, self._slots)

    def add(self, load: Load) -> None:
        insort(self._loads, load)
        self._end = None

    def remove(self, load: Load) -> None:
        self._loads.remove(load)
        self._end = None


class _Placed(NamedTuple):
    engine: str
    version: int
    load: Load


class Oracle(Rule):
    name = "oracle"

    def __init__(self, foresight: Foresight) -> None:
        self._truth, self._steps, self._max_num_seqs = foresight
        self._plans: dict[str, DrainPlan] = {}
        self._placed: dict[str, _Placed] = {}
        self._waits: dict[str, tuple[str, int]] = {}
        """Per waiting turn: the engine, and the value of ``_ends`` when it was chosen."""
        self._ends = 0
        self._siblings: dict[str, str] = {}

    @classmethod
    def foreseeing(
        cls, work: Sequence[TrajectoryRecord], engines: Sequence[EngineSpec], settings: SimulationSettings
    ) -> Oracle:
        return cls(foresight_of(work, engines, settings))

    def key(self, turn: TurnView, now: float) -> float:
        """See `Policy.key`: longest remaining time first, at the speed of one sequence on the largest TP degree."""
        work = self._truth(turn.trajectory, turn.turns)
        steps = self._steps[max(self._steps)]
        pace = steps.step_s(1, turn.context_tokens + work.decode_tokens // 2)
        return -(
            work.decode_tokens * pace
            + prefill_s(steps, work.fresh_tokens + work.new_tokens, turn.context_tokens)
            + work.tool_s
        )

    def route(self, turn: TurnView, board: Board, now: float) -> Decision:
        priority = round(self.key(turn, now) * PRIORITIES_PER_S)
        name, ends = self._waits.get(turn.trajectory, ("", -1))
        if ends == self._ends and name in board.engines and _full(board.engines[name]):
            return _wait_for(board.engines[name], priority)
        options = [
            e
            for e in board.engines.values()
            if e.open and e.kv_capacity >= turn.context_tokens and (e.inflight < e.cap or e.inflight > 0)
        ]
        options = options or eligible(turn, board)
        if not options:
            return wait(board, priority=priority)
        self._update_plans(board)
        work = self._truth(turn.trajectory, turn.turns)
        placed = self._placed.get(turn.trajectory)
        home = last_engine(turn, options)
        # A weight update empties the cache.
        cached = home is not None and placed is not None and placed.version == home.version
        self.forget(turn.trajectory)
        near = None if turn.attained_tokens else self._near(turn.prompt_id, board)
        best, load, gain = self._best(turn, work, home=home, cached=cached, near=near, options=options)
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
            return _wait_for(best, priority)
        if best is near:
            reason = "with {left:.0f} tokens left, {engine} ends first, for it has the prompt cached: {end_s:.2f} s"
        elif home is None:
            reason = "with {left:.0f} tokens left, {engine} ends first: {end_s:.2f} s"
        elif best is home:
            reason = "stays on {engine}, which ends in {end_s:.2f} s: no move ends sooner"
        else:
            reason = "moves to {engine}: the later of both ends falls by {gain_s:.2f} s"
        return Decision(engine=best.engine, priority=priority, level=best.level, template=reason, numbers=numbers)

    def finished(self, record: Finished, now: float) -> None:
        self._ends += 1
        super().finished(record, now)

    def forget(self, trajectory: str) -> None:
        self._waits.pop(trajectory, None)
        placed = self._placed.pop(trajectory, None)
        if placed is not None and placed.engine in self._plans:
            self._plans[placed.engine].remove(placed.load)

    def _best(
        self,
        turn: TurnView,
        work: OracleWork,
        *,
        home: EngineView | None,
        cached: bool,
        near: EngineView | None,
        options: list[EngineView],
    ) -> tuple[EngineView, Load, float]:
        """The best engine, the load there, and the seconds by which going there shortens the end."""
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
        """The engine that has the prompt cached because the latest sibling is placed there."""
        placed = self._placed.get(self._siblings.get(prompt_id, ""))
        if placed is None:
            return None
        engine = board.engines.get(placed.engine)
        return engine if engine is not None and engine.version == placed.version else None

    def _update_plans(self, board: Board) -> None:
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
            # At admission the prompt of a sibling is cached whole.
            fresh = min(fresh, work.fresh_tokens) if turn.attained_tokens else 0
        later = turn.context_tokens + work.decode_tokens
        prefill = prefill_s(steps, fresh, turn.context_tokens - fresh) + prefill_s(steps, work.new_tokens, later)
        mean = turn.context_tokens + (work.decode_tokens + work.new_tokens) // 2
        return Load(
            tokens=max(1, work.decode_tokens), name=turn.trajectory, prefill_s=prefill, tool_s=work.tool_s, context=mean
        )


def _full(engine: EngineView) -> bool:
    return not (engine.open and engine.inflight < engine.cap)


def _wait_for(engine: EngineView, priority: int) -> Decision:
    reason = "wait: {engine} is full and still the best"
    return Decision(
        engine="", priority=priority, level=engine.level, template=reason, numbers={"engine": engine.engine}
    )


def foresight_of(
    work: Sequence[TrajectoryRecord], engines: Sequence[EngineSpec], settings: SimulationSettings
) -> Foresight:
    """The future of ``work``, by the names of `trajectory_ids`; a TP degree has the step times of its first engine."""
    left = {name: _remaining(spec) for name, spec in zip(trajectory_ids(work), work, strict=True)}
    steps = {engine.tp: engine.steps for engine in reversed(engines)}
    return Foresight(lambda name, turns: left[name][turns], steps, settings.max_num_seqs)


def _remaining(spec: TrajectoryRecord) -> list[OracleWork]:
    left: list[OracleWork] = []
    decode = new = 0
    tool_s = 0.0
    for index in range(len(spec.turns) - 1, -1, -1):
        turn = spec.turns[index]
        decode += turn.gen_tokens
        tool_s += turn.tool_s
        fresh = turn.new_tokens if index else spec.prompt_tokens + turn.new_tokens
        left.append(OracleWork(decode_tokens=decode, fresh_tokens=fresh, new_tokens=new, tool_s=tool_s))
        new += turn.new_tokens
    left.reverse()
    return left
