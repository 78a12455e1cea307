"""`autellix`: program-level least attained service of Autellix (arXiv 2502.13965); a trajectory is its program.

- Service of a program: decode seconds of its turns so far.
- Queue q holds programs with service in [`QUANTUM_S` 2^(q-1), `QUANTUM_S` 2^q), queue 0 those below `QUANTUM_S`.
- Lower queues go first, first come, first served within one; the queue is the engine's priority too.
- A program has waited `BETA` times its service -> queue 0.  So the key of a turn is the moment it enters queue 0.
- Context of at most `LOCAL_TOKENS` -> the engine with the fewest turns in flight.
- Longer context -> the program's engine, or the least used one, which it then stays with.

The rules and `LOCAL_TOKENS` are the paper's; the other constants are chosen here.
"""

from __future__ import annotations

from libra_hpc.policies.scheduling.board import Board
from libra_hpc.policies.scheduling.protocol import Decision, TurnView
from libra_hpc.policies.scheduling.rules import Rule, eligible, wait

QUANTUM_S = 2.0
"""Seconds of service in queue 0; quanta double, as in FastServe."""
QUEUES = 8
"""The last one starts at 128 s."""
BETA = 1.0
"""Waiting time over service at which a program enters queue 0."""
LOCAL_TOKENS = 2_048
DECODE_S = 0.02
"""Seconds per token while an engine has no measurement."""


class _Program:
    __slots__ = ("attained", "decode_s", "engine", "service_s", "waited_s")

    def __init__(self) -> None:
        self.attained = 0
        self.decode_s = DECODE_S
        self.engine = ""
        self.service_s = self.waited_s = 0.0

    @property
    def queue(self) -> int:
        return min(QUEUES - 1, int(self.service_s / QUANTUM_S).bit_length())


def lower_bound_s(queue: int) -> float:
    """Lower boundary of a queue, seconds of service."""
    return QUANTUM_S * 2.0 ** (queue - 1) if queue else 0.0


class Autellix(Rule):
    """Least attained service first, with data locality."""

    name = "autellix"

    def __init__(self) -> None:
        self._programs: dict[str, _Program] = {}

    def key(self, turn: TurnView, now: float) -> float:
        """See `Policy.key`: the moment the turn belongs to queue 0."""
        program = self._program(turn)
        return turn.ready_at + max(0.0, BETA * lower_bound_s(program.queue) - program.waited_s)

    def route(self, turn: TurnView, board: Board, now: float) -> Decision:
        program = self._program(turn)
        queue = 0 if now >= self.key(turn, now) else program.queue
        free = eligible(turn, board)
        if not free:
            return wait(board, priority=queue)
        local = turn.context_tokens > LOCAL_TOKENS
        chosen = next((e for e in free if e.engine == program.engine), None) if local else None
        reason = "queue {queue:.0f} after {service_s:.1f} s of service: its program's engine {engine}"
        if chosen is None:
            chosen = min(free, key=lambda e: e.inflight)
            reason = "queue {queue:.0f} after {service_s:.1f} s of service: least used engine {engine}"
        if local:
            program.engine = chosen.engine
        program.waited_s += now - turn.ready_at
        program.decode_s = chosen.decode_s or DECODE_S
        numbers: dict[str, float | str] = {
            "queue": float(queue),
            "service_s": program.service_s,
            "waited_s": program.waited_s,
            "engine": chosen.engine,
        }
        return Decision(engine=chosen.engine, priority=queue, level=chosen.level, template=reason, numbers=numbers)

    def forget(self, trajectory: str) -> None:
        self._programs.pop(trajectory, None)

    def _program(self, turn: TurnView) -> _Program:
        program = self._programs.setdefault(turn.trajectory, _Program())
        program.service_s += (turn.attained_tokens - program.attained) * program.decode_s
        program.attained = turn.attained_tokens
        return program
