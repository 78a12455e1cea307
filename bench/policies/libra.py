"""Two rules of Libra's code (arXiv 2606.03077): `cmlfq_cost` with a prefix tree of remaining tokens, and `la_mlfq`."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque

from libra_hpc.policies.scheduling.board import Board, EngineView
from libra_hpc.policies.scheduling.protocol import Decision, Finished, TurnView
from libra_hpc.policies.scheduling.rules import LiveTrajectories, Rule, eligible, last_engine, wait
from libra_hpc.protocol.env import Signal

RING = 200
"""Newest samples of a node that count."""
SMALL, MEDIUM = 500, 5_000
"""Upper bounds of the payload classes, tokens."""
REBUILD_VERSIONS = 5
"""Steps, in the published 48-GPU configuration."""
RECENT = 5_000
"""Trajectories in a rebuild."""

Symbol = tuple[str, int, str]


def symbol(signal: Signal) -> Symbol:
    """(tool, payload class 0..2, ``success`` | ``failure`` | ``timeout``); a task's own outcome class is a success."""
    size = 0 if signal.payload_tokens <= SMALL else 1 if signal.payload_tokens <= MEDIUM else 2
    return signal.tool, size, {"error": "failure", "timeout": "timeout"}.get(signal.outcome, "success")


class PrefixNode:
    """Samples of one path."""

    def __init__(self) -> None:
        self.recent: deque[float] = deque(maxlen=RING)
        self.children: dict[Symbol, PrefixNode] = {}


class PrefixTree:
    """The global tree and one tree per prompt.

    - A path is the sequence of symbols (tool, payload class, status), in a tree per prompt and in a global one.
    - A trajectory of T tokens ends, with tool returns at p_1..p_m -> the root gets T, depth i gets max(0, T - p_i).
    - A node has the last `RING` samples.
    - A lookup walks the prompt's tree as deep as it matches; without one, the global tree.
    - `REBUILD_VERSIONS` weight versions pass -> both are rebuilt from the last `RECENT` trajectories.

    The original derives the status from text; here it comes from the signal's outcome.
    """

    def __init__(self) -> None:
        self._global = PrefixNode()
        self._prompts: dict[str, PrefixNode] = {}
        self._recent: deque[Finished] = deque(maxlen=RECENT)
        self._built = 0

    def insert(self, record: Finished) -> None:
        """Learn from a completed trajectory."""
        self._recent.append(record)
        if record.version // REBUILD_VERSIONS > self._built:
            self._built = record.version // REBUILD_VERSIONS
            self._global, self._prompts = PrefixNode(), {}
            for old in self._recent:
                self._learn(old)
        else:
            self._learn(record)

    def look_up(self, prompt_id: str, signals: tuple[Signal, ...]) -> PrefixNode:
        """The deepest node that matches; without samples if nothing was learned."""
        node = self._prompts.get(prompt_id, self._global)
        for signal in signals:
            child = node.children.get(symbol(signal))
            if child is None:
                break
            node = child
        return node

    def _learn(self, record: Finished) -> None:
        if not record.signals:
            return
        for node in (self._global, self._prompts.setdefault(record.prompt_id, PrefixNode())):
            node.recent.append(record.generated_tokens)
            for signal, at in zip(record.signals, record.at_signal, strict=False):
                node = node.children.setdefault(symbol(signal), PrefixNode())
                node.recent.append(max(0, record.generated_tokens - at))


THRESHOLDS = (4_000, 12_000, 30_000)
"""Tokens: upper bounds of TP 1, 2 and 4 in the published 48-GPU configuration."""
MAX_QUEUE_LENGTH = 100
"""Trajectories; the library's default.  The 48-GPU configuration sets 3 with 16 trajectories in flight; with many more,
3 makes the rule plain least connections."""


class LengthBuckets:
    """Thresholds and live trajectories; ``max_queue_length`` <= 0 means no limit.

    - A length -> the first TP class whose threshold is not below it, else the last; k classes use k - 1 thresholds.
    - A bucket -> its own TP class, then all others in ascending order.
    - Within a class -> the engine with the fewest live trajectories, below ``max_queue_length``; ties: the first one.
    - No engine is below the limit -> the engine with the fewest live trajectories of all.

    A trajectory is live from its first turn to its end, tool time included.
    """

    def __init__(self, thresholds: tuple[int, ...] = THRESHOLDS, max_queue_length: int = MAX_QUEUE_LENGTH) -> None:
        self.thresholds = thresholds
        self._limit = max_queue_length
        self.live = LiveTrajectories()

    def level(self, length: float, levels: int) -> int:
        """Bucket of a length in tokens, out of ``levels``."""
        return bisect_left(self.thresholds[: max(0, levels - 1)], length)

    def choose(self, level: int, turn: TurnView, board: Board) -> EngineView | None:
        """Choose an engine for a trajectory of bucket ``level`` and count it there; None if none is eligible."""
        free = eligible(turn, board)
        below = [e for e in free if self.live.count(e) < self._limit] if self._limit > 0 else free
        levels = [level, *range(len(board.classes))]
        chosen = min(below, key=lambda e: (levels.index(e.level), self.live.count(e)), default=None)
        if chosen is None and free:
            chosen = min(free, key=self.live.count)
        if chosen is not None:
            self.live.put(turn.trajectory, chosen.engine)
        return chosen


Bins = list[tuple[float, float]]
"""(share of the samples, their mean remaining tokens)."""


class CmlfqCost(Rule):
    """The engine of the least expected decode and move seconds; ``max_queue_length`` <= 0 means no limit.

    - The last samples at the tree node of the path -> bins of remaining tokens, cut at `THRESHOLDS`, with their shares.
    - Every turn -> the engine with the least sum over bins of share * decode seconds, plus the seconds of the move.
    - Decode seconds of n tokens: n steps of one sequence, at the context that it has half-way.  Load does not enter.
    - The move: nothing at the engine of the last turn, elsewhere a prefill of the context.
    - Ties -> the engine of the last turn, then fewer live trajectories, then the first to join.
    - Only engines with fewer than ``max_queue_length`` live trajectories, while there is one; else the fewest.
    - No sample yet -> the smallest TP, least live trajectories; later turns stay.

    The original has measured tables of decode steps and moves; here the step costs of the board stand for them.
    """

    name = "cmlfq_cost"

    def __init__(self, thresholds: tuple[int, ...] = THRESHOLDS, max_queue_length: int = MAX_QUEUE_LENGTH) -> None:
        self.tree = PrefixTree()
        self._thresholds = thresholds
        self._limit = max_queue_length
        self._live = LiveTrajectories()

    def route(self, turn: TurnView, board: Board, now: float) -> Decision:
        free = eligible(turn, board)
        if not free:
            return wait(board)
        # The trajectory itself does not count as load.
        self._live.drop(turn.trajectory)
        below = [e for e in free if self._live.count(e) < self._limit] if self._limit > 0 else free
        last = last_engine(turn, free)
        node = self.tree.look_up(turn.prompt_id, turn.signals)
        numbers: dict[str, float | str] = {"seen": float(len(node.recent))}
        if not node.recent:
            chosen = last or min(below, key=lambda e: (e.tp, self._live.count(e)), default=None)
            reason = "nothing is known: {engine}"
        else:
            bins = self.bins(node)
            costs = {e.engine: self._seconds(turn, e, bins) for e in below}
            chosen = min(below, key=lambda e: (costs[e.engine], e is not last, self._live.count(e)), default=None)
            numbers["seconds"] = costs[chosen.engine] if chosen is not None else 0.0
            reason = "{engine} decodes the rest in {seconds:.1f} s, after {seen:.0f} samples"
        if chosen is None:
            chosen, reason = min(free, key=self._live.count), "all engines are at the limit: {engine}"
        self._live.put(turn.trajectory, chosen.engine)
        numbers["engine"] = chosen.engine
        return Decision(engine=chosen.engine, priority=0, level=chosen.level, template=reason, numbers=numbers)

    def bins(self, node: PrefixNode) -> Bins:
        """The samples of a node by bin; empty bins are left out."""
        found: list[list[float]] = [[] for _ in range(len(self._thresholds) + 1)]
        samples = node.recent
        for value in samples:
            found[bisect_left(self._thresholds, value)].append(value)
        return [(len(values) / len(samples), sum(values) / len(values)) for values in found if values]

    def finished(self, record: Finished, now: float) -> None:
        self.tree.insert(record)
        super().finished(record, now)

    def forget(self, trajectory: str) -> None:
        self._live.drop(trajectory)

    @staticmethod
    def _seconds(turn: TurnView, engine: EngineView, bins: Bins) -> float:
        costs, context = engine.tp_class, turn.context_tokens
        seconds = sum(share * left * (costs.base_s + costs.slope_s * (context + left / 2)) for share, left in bins)
        return seconds if engine.engine == turn.engine else seconds + costs.prefill_s * context


FOLLOW_S = 60.0
TTL_VERSIONS = 5
"""Weight versions; epochs in the original."""


class LaMlfq(Rule):
    """Scouts measure the length of a prompt for their siblings.

    - First sample of a prompt without history -> the *scout*; it starts in the shortest bucket.
    - Its siblings -> wait for its end, at most `FOLLOW_S`, behind every turn that is ready; then the shortest bucket.
    - A trajectory ends -> later samples of the prompt start in the bucket of its length, for `TTL_VERSIONS`.
    - A trajectory exceeds the threshold of its bucket -> it moves up.  The original never calls this check, so scouts
      of long prompts would stay in the shortest bucket.
    - Otherwise -> the engine of the last turn while it is eligible.
    """

    name = "la_mlfq"

    def __init__(self, thresholds: tuple[int, ...] = THRESHOLDS, max_queue_length: int = MAX_QUEUE_LENGTH) -> None:
        self._buckets = LengthBuckets(thresholds, max_queue_length)
        self._level: dict[str, int] = {}
        self._scout: dict[str, str] = {}
        """By prompt: the trajectory that goes first, until it ends."""
        self._scouted: dict[str, str] = {}
        """By scout: its prompt."""
        self._history: dict[str, tuple[int, int]] = {}
        """By prompt: generated tokens of its last trajectory, and weight version."""
        self._version = 0

    def key(self, turn: TurnView, now: float) -> float:
        """See `Policy.key`: a sibling of a scout counts as ready after `FOLLOW_S`."""
        return turn.ready_at + FOLLOW_S if self._follows(turn) else turn.ready_at

    def route(self, turn: TurnView, board: Board, now: float) -> Decision:
        if self._follows(turn) and now - turn.ready_at < FOLLOW_S:
            reason = "wait: {scout} scouts for this prompt"
            return Decision(engine="", priority=0, level=0, template=reason, numbers={"scout": self._scout_of(turn)})
        levels = len(board.classes)
        old = self._level.get(turn.trajectory, -1)
        level = min(
            self._start(turn, levels) if old < 0 else max(old, self._buckets.level(turn.attained_tokens, levels)),
            max(0, levels - 1),
        )
        numbers: dict[str, float | str] = {"attained": float(turn.attained_tokens), "bucket": float(level)}
        if level == old:
            last = last_engine(turn, eligible(turn, board))
            if last is not None:
                return Decision(
                    engine=last.engine,
                    priority=0,
                    level=last.level,
                    template="stay in bucket {bucket:.0f} on {engine}",
                    numbers={**numbers, "engine": last.engine},
                )
        chosen = self._buckets.choose(level, turn, board)
        if chosen is None:
            return wait(board, level)
        self._level[turn.trajectory] = level
        reason = "bucket {bucket:.0f} after {attained:.0f} tokens, least connections {engine}"
        numbers["engine"] = chosen.engine
        return Decision(engine=chosen.engine, priority=0, level=chosen.level, template=reason, numbers=numbers)

    def finished(self, record: Finished, now: float) -> None:
        self._version = max(self._version, record.version)
        self._history[record.prompt_id] = (record.generated_tokens, record.version)
        if len(self._history) > 2 * len(self._level) + 1024:
            self._history = {p: h for p, h in self._history.items() if self._version - h[1] <= TTL_VERSIONS}
        super().finished(record, now)

    def forget(self, trajectory: str) -> None:
        """See `Policy.forget`: the prompt of an aborted scout gets a new one."""
        if trajectory in self._scouted:
            del self._scout[self._scouted.pop(trajectory)]
        self._level.pop(trajectory, None)
        self._buckets.live.drop(trajectory)

    def _start(self, turn: TurnView, levels: int) -> int:
        known = self._known(turn.prompt_id)
        return 0 if known is None else self._buckets.level(known, levels)

    def _known(self, prompt_id: str) -> int | None:
        length, version = self._history.get(prompt_id, (0, self._version - TTL_VERSIONS - 1))
        return length if self._version - version <= TTL_VERSIONS else None

    def _follows(self, turn: TurnView) -> bool:
        """Whether a turn starts a sibling of a scout; the first turn of a prompt becomes the scout."""
        if turn.trajectory in self._level or self._known(turn.prompt_id) is not None:
            return False
        return self._scout_of(turn) != turn.trajectory

    def _scout_of(self, turn: TurnView) -> str:
        """The scout of the turn's prompt; without one, the turn's trajectory becomes it."""
        scout = self._scout.setdefault(turn.prompt_id, turn.trajectory)
        self._scouted[scout] = turn.prompt_id
        return scout
