"""C-MLFQ: a multi-level feedback queue whose feedback is causal (what the prompt and the tools said), not only how long a trajectory has run.

Levels are the TP classes of the engines present, ascending: level 0 has the most replicas and the slowest single sequence.

Where a turn goes.  Every engine with a free slot and enough KV cache is priced in seconds of this trajectory until its end,

    cost(engine) = tokens to prefill * prefill_s(class) + remaining tokens * decode_s(class, load of the engine),

with the remaining tokens from the causal tree (`tree`) and the load in KV tokens in flight (`buckets`).  The engine of the last turn has the
prefix cached and prefills only what the tool added, unless its weights were swapped since, which empties its cache.  Within a level the cheapest
engine wins.

* Admission: level 0, unless siblings of the prompt have finished (evidence of at least `MIN_SIBLINGS` = 0.5, one within the tree's half-life):
  then the level that is cheapest for what they took.
* Later turns are tool gaps, the only points at which a trajectory may change level, up or down.  It does when the time it saves in decoding and
  queueing exceeds `MOVE_MARGIN` = 1.5 times the prefill it repeats, because the estimate of the saving is far less certain than the cost, and is at
  least `MIN_SAVING` = 0.1 of what staying costs, because speeds are measured to within some 10 % and smaller differences would only shuffle prefixes.
* No free slot in its level: the cheapest engine of any other.  No free slot anywhere: wait.

Who goes first.  A turn ready at time t counts as ready at t - credit, where credit = `AGEING_S` * r / (r + m), r being its estimated remaining
tokens and m the mean total: a batch ends with its slowest trajectory, so long ones go first, but only by a bounded head start.  Both `order` and
the engine's priority use this virtual time.  Since 0 <= credit < `AGEING_S` = 2 s, a turn is never overtaken by one that became ready 2 s or
more after it: that is the bound on starvation.  Two seconds are a few turns' worth of queueing and small against a step.

With one TP class there is one level, and this is load-aware routing with prefix affinity.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from libra_hpc.sched.buckets import Bucket, buckets
from libra_hpc.sched.protocol import Decision, EngineView, Finished, TurnView
from libra_hpc.sched.tree import CausalTree, Remaining

MOVE_MARGIN = 1.5
MIN_SAVING = 0.1
MIN_SIBLINGS = 0.5
AGEING_S = 2.0
PRIORITIES_PER_S = 10
"""Grain of the engine's integer priority: 0.1 s of virtual time."""
MAX_TRACKED = 65_536
"""Trajectories remembered at once (some 30 MB); more than any gate lets be open, so only abandoned ones are ever forgotten."""


class _Tracked:
    """What is remembered of a running trajectory: the estimate of its present turn, and where it last ran."""

    __slots__ = ("credit", "left", "tp", "turns", "version")

    def __init__(self) -> None:
        self.turns = -1
        self.left = Remaining(0.0, 0.0, 0.0, 0.0, 0.0)
        self.credit = 0.0
        self.tp = 0
        self.version = -1


class _Offer:
    """An engine priced for one turn."""

    __slots__ = ("bucket", "decode_s", "engine", "prefill_s", "total_s")

    def __init__(self, engine: EngineView, bucket: Bucket, prefill_s: float, decode_s: float) -> None:
        self.engine = engine
        self.bucket = bucket
        self.prefill_s = prefill_s
        self.decode_s = decode_s
        self.total_s = prefill_s + decode_s


class CausalMlfq:
    """See the module."""

    name = "cmlfq"

    def __init__(self) -> None:
        self.tree = CausalTree()
        self._tracked: OrderedDict[str, _Tracked] = OrderedDict()
        self._origin: float | None = None

    def route(self, turn: TurnView, engines: Sequence[EngineView], now: float) -> Decision:
        """Choose the engine on which the trajectory is expected to end soonest, under the rules of the module, or wait."""
        tracked = self._track(turn)
        if self._origin is None:
            self._origin = now
        priority = round((now - turn.waited_s - tracked.credit - self._origin) * PRIORITIES_PER_S)
        classes = buckets(engines)
        home = _home(tracked.tp, classes)
        stay, move = self._offers(turn, tracked, engines, classes, home)
        left = tracked.left
        numbers = {"remaining": left.mean, "p50": left.p50, "p90": left.p90, "own": left.own, "seen": left.seen}
        if stay is None and move is None:
            level = classes[home].level if classes else 0
            return Decision("", priority, level, f"wait: none of {len(engines)} engines has a free slot", numbers)
        chosen, reason = _choose(turn, left, stay, move, numbers)
        numbers["cost_s"] = chosen.total_s
        tracked.tp = chosen.engine.tp
        tracked.version = chosen.engine.version
        return Decision(chosen.engine.engine, priority, chosen.bucket.level, reason, numbers)

    def order(self, turns: Sequence[TurnView], now: float) -> list[int]:
        """Earliest virtual time first."""
        keys = [-turn.waited_s - self._track(turn).credit for turn in turns]
        return sorted(range(len(turns)), key=keys.__getitem__)

    def finished(self, record: Finished, now: float) -> None:
        """Teach the tree, forget the trajectory."""
        self.tree.insert(record)
        self._tracked.pop(record.trajectory, None)

    def _track(self, turn: TurnView) -> _Tracked:
        tracked = self._tracked.get(turn.trajectory)
        if tracked is None:
            tracked = self._tracked[turn.trajectory] = _Tracked()
            if len(self._tracked) > MAX_TRACKED:
                self._tracked.popitem(last=False)
        if tracked.turns != turn.turns:
            tracked.turns = turn.turns
            tracked.left = self.tree.estimate(turn.prompt_id, turn.signals, turn.attained_tokens)
            tracked.credit = AGEING_S * tracked.left.mean / (tracked.left.mean + max(1.0, self.tree.mean_total))
        return tracked

    def _offers(
        self, turn: TurnView, tracked: _Tracked, engines: Sequence[EngineView], classes: dict[int, Bucket], home: int
    ) -> tuple[_Offer | None, _Offer | None]:
        """The cheapest free engine of the home class and the cheapest of all others."""
        context, remaining = turn.context_tokens, tracked.left.mean
        fresh = min(context, max(1, turn.signals[-1].payload_tokens)) if turn.signals else context
        stay: _Offer | None = None
        move: _Offer | None = None
        # A context no engine can hold is for the engine to refuse: waiting for a slot would be for ever.
        need = context if any(engine.kv_capacity >= context for engine in engines) else 0
        for engine in engines:
            if engine.inflight >= engine.max_inflight or engine.kv_capacity < need:
                continue
            bucket = classes[engine.tp]
            cached = engine.engine == turn.engine and tracked.version in (-1, engine.version)
            offer = _Offer(engine, bucket, (fresh if cached else context) * bucket.prefill_s, remaining * bucket.decode_cost(engine, context))
            if engine.tp == home:
                if stay is None or offer.total_s < stay.total_s:
                    stay = offer
            elif move is None or offer.total_s < move.total_s:
                move = offer
        return stay, move


def _home(tp: int, classes: dict[int, Bucket]) -> int:
    """The class a trajectory is in: where it last ran, the nearest class when that one is gone, the lowest for a new one (``tp`` = 0)."""
    if tp in classes or not classes:
        return tp
    return min(classes, key=lambda c: max(c / tp, tp / c)) if tp else min(classes)


def _choose(turn: TurnView, left: Remaining, stay: _Offer | None, move: _Offer | None, numbers: dict[str, float]) -> tuple[_Offer, str]:
    """Stay in the home class or move, and why."""
    if move is None:
        assert stay is not None
        return stay, f"{stay.engine.engine} ends it soonest: {stay.total_s:.2f} s"
    if stay is None:
        return move, f"no free slot in its level; {move.engine.engine} ends it soonest: {move.total_s:.2f} s"
    if turn.turns == 0 and left.own < MIN_SIBLINGS:
        return stay, f"starts low: no sibling has finished; {stay.engine.engine} ends it soonest: {stay.total_s:.2f} s"
    saving, cost = stay.decode_s - move.decode_s, max(0.0, move.prefill_s - stay.prefill_s)
    numbers["saving_s"], numbers["move_s"] = saving, cost
    verdict = f"move to TP {move.bucket.tp} costs {cost:.2f} s, saves {saving:.2f} s of {stay.total_s:.2f} s"
    if saving > MOVE_MARGIN * cost and saving > MIN_SAVING * stay.total_s:
        return move, f"move: {verdict}"
    return stay, f"stay: {verdict}"
