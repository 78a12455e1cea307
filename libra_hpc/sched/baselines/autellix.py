"""`autellix`: program-level least attained service (PLAS) of Autellix (arXiv 2502.13965); a trajectory is its program.

* Service of a program: seconds its turns so far were decoding (tokens times the engine's measured seconds per token,
  `DECODE_S` = 0.02 while unmeasured).
* Discretised: queue q holds programs with service in [`QUANTUM_S` 2^(q-1), `QUANTUM_S` 2^q), queue 0 those below
  `QUANTUM_S` = 2 s, `QUEUES` = 8 in all. Lower queues first, first come, first served within one.
* Anti-starvation: a program whose total waiting time W reaches `BETA` = 1 times its service T is served from queue 0.
  A turn's place is therefore one number, the moment it belongs to queue 0: ready_at + max(0, `BETA` T - W), with T
  rounded down to its queue's lower boundary.
* Data locality: contexts up to `LOCAL_TOKENS` = 2,048 tokens go to the engine with the fewest turns in flight, longer
  ones to their program's engine (the one of its first long context), or the least used one when that is not eligible,
  which it then keeps.

The queues, W/T and the locality rule are the paper's; the constants other than 2,048 are not published and are chosen
here (quanta that double, as in FastServe).  Within an engine the queue is the priority.
"""

from __future__ import annotations

from libra_hpc.sched.baselines.common import Baseline, eligible, wait
from libra_hpc.sched.board import Board
from libra_hpc.sched.protocol import Decision, TurnView

QUANTUM_S = 2.0
QUEUES = 8
BETA = 1.0
LOCAL_TOKENS = 2_048
DECODE_S = 0.02


class _Program:
    """What the process table keeps."""

    __slots__ = ("attained", "decode_s", "engine", "service_s", "waited_s")

    def __init__(self) -> None:
        self.attained = 0
        self.decode_s = DECODE_S
        self.engine = ""
        self.service_s = self.waited_s = 0.0

    @property
    def queue(self) -> int:
        """Queue of its service."""
        return min(QUEUES - 1, int(self.service_s / QUANTUM_S).bit_length())


def lower_bound_s(queue: int) -> float:
    """Lower boundary of a queue, seconds of service."""
    return QUANTUM_S * 2.0 ** (queue - 1) if queue else 0.0


class Autellix(Baseline):
    """See the module."""

    name = "autellix"

    def __init__(self) -> None:
        self._programs: dict[str, _Program] = {}

    def key(self, turn: TurnView, now: float) -> float:
        """See `Policy.key`: the moment the turn belongs to queue 0."""
        program = self._program(turn)
        return turn.ready_at + max(0.0, BETA * lower_bound_s(program.queue) - program.waited_s)

    def route(self, turn: TurnView, board: Board, now: float) -> Decision:
        """See `Policy.route`."""
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
        return Decision(chosen.engine, queue, chosen.level, reason, numbers)

    def forget(self, trajectory: str) -> None:
        """See `Policy.forget`."""
        self._programs.pop(trajectory, None)

    def _program(self, turn: TurnView) -> _Program:
        program = self._programs.setdefault(turn.trajectory, _Program())
        program.service_s += (turn.attained_tokens - program.attained) * program.decode_s
        program.attained = turn.attained_tokens
        return program
