"""`la_mlfq`: length-aware MLFQ with scouts, from Libra's code (arXiv 2606.03077), on `length_buckets`.

- First sample of a prompt without history -> the *scout*; it starts in the shortest bucket.
- Its siblings -> wait for its end, at most `FOLLOW_S`, behind every turn that is ready; then the shortest bucket.
- A trajectory ends -> later samples of the prompt start in the bucket of its length, for `TTL_VERSIONS`.
- A trajectory exceeds the threshold of its bucket -> it moves up.  The original never calls this check, so scouts of
  long prompts would stay in the shortest bucket.
- Otherwise -> the engine of the last turn while it is eligible.
"""

from __future__ import annotations

from libra_hpc.policies.scheduling.board import Board
from libra_hpc.policies.scheduling.protocol import Decision, Finished, TurnView
from libra_hpc.policies.scheduling.rules.length_buckets import MAX_QUEUE_LENGTH, THRESHOLDS, LengthBuckets
from libra_hpc.policies.scheduling.rules.rule import Rule, eligible, last_engine, wait

FOLLOW_S = 60.0
TTL_VERSIONS = 5
"""Weight versions; epochs in the original."""


class LaMlfq(Rule):
    """Scouts measure the length of a prompt for their siblings."""

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
