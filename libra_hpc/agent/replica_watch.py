"""Whether a training replica makes progress: the judgement of its node, from orders, answers and signs of life.

- The replica is serial -> an order counts from when the one before it was answered.
- It has copied its state for a checkpoint -> the write is an operation of its own, beside the next orders.
- An order takes more than half of its limit -> late, reported once.
- More than its limit, and the replica computes -> hung.
- More than its limit, and all its processes wait for other replicas -> the limit is `PEERS` times as long.
- A process with something to do gives no sign of life for ``floor_s`` -> hung; for half of that -> late.

Pure: times are seconds of any monotonic clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from typing import Any

from libra_hpc.process.deadlines import LATE_SHARE, DeadlineLimits, Deadlines, Pending
from libra_hpc.protocol.trainer import (
    Export,
    Exported,
    ExportFailed,
    Join,
    Joined,
    SaveCheckpoint,
    Saved,
    SaveFailed,
    SaveStarted,
    StepDone,
    StepFailed,
    TrainStep,
    WorkerFailed,
    WorkerHeartbeat,
)
from libra_hpc.trainer.link import CHECKPOINT, COMPUTE, WAITING

PEERS = 3.0
"""Limits that a replica may take while it waits for others.

Half: it may be ended before the slow one; double: a lost message holds the run so much longer.
"""
FRESH_S = 5.0
"""Signs of life come every second; an older one proves nothing about now."""
START, WRITE = "start", "write of a checkpoint"


def order_key(message: Any) -> tuple[str, Hashable] | None:
    """Name and number of an order or of its answer; None: not watched."""
    match message:
        case Join(generation=number, attempt=attempt) | Joined(generation=number, attempt=attempt):
            return "join", (number, attempt)
        case TrainStep(step=number) | StepDone(step=number) | StepFailed(step=number):
            return "train step", number
        case Export(version=number) | Exported(version=number) | ExportFailed(version=number):
            return "export", number
        case SaveCheckpoint(step=number) | SaveStarted(step=number):
            return CHECKPOINT, number
        case WorkerFailed(generation=number, attempt=attempt) if number >= 0:
            return "join", (number, attempt)
    return None


class ReplicaWatch:
    def __init__(self, settings: DeadlineLimits) -> None:
        self._silent_s = settings.floor_s
        self._deadlines = Deadlines(settings)
        self._orders: deque[tuple[str, Hashable]] = deque()
        """Orders without an answer; the replica carries out the first."""
        self._alive: dict[int, tuple[str, float]] = {}
        self._silent_reported: set[int] = set()

    def started(self, now: float) -> None:
        self.clear()
        self._deadlines.begin(START, (START, 0), now)

    def ready(self, now: float) -> None:
        self._deadlines.end((START, 0), now)

    def asked(self, message: Any, now: float) -> None:
        key = order_key(message)
        if key is not None:
            self._orders.append(key)
            if len(self._orders) == 1:
                self._deadlines.begin(key[0], key, now)

    def answered(self, message: Any, now: float) -> None:
        """The replica answered; a failure's duration does not count."""
        if isinstance(message, Saved):
            self._deadlines.end(WRITE, now)
        elif isinstance(message, SaveFailed):
            self._deadlines.forget(WRITE)
        key = order_key(message)
        if key is None or key not in self._orders:
            return
        while self._orders[0] != key:
            self._deadlines.forget(self._orders.popleft())
        self._orders.popleft()
        if isinstance(message, StepFailed | ExportFailed | WorkerFailed):
            self._deadlines.forget(key)
        else:
            self._deadlines.end(key, now)
        if isinstance(message, SaveStarted):
            self._deadlines.begin(WRITE, WRITE, now)
        # A phase of before the answer has ended with it.
        self._alive = {
            process: (COMPUTE if phase == key[0] else phase, at) for process, (phase, at) in self._alive.items()
        }
        if self._orders:
            self._deadlines.begin(self._orders[0][0], self._orders[0], now)

    def alive(self, process: int, message: WorkerHeartbeat, now: float) -> None:
        self._alive[process] = (message.phase, now)
        self._silent_reported.discard(process)

    def give_up(self, now: float) -> str:
        """Why the run is to fail, if so: the replica is ended because it is hung."""
        failures = [self._deadlines.exceeded(pending.key) for pending in self._deadlines.pending(now, 0.0)]
        self.clear()
        return next(filter(None, failures), "")

    def clear(self) -> None:
        self._deadlines.clear()
        self._orders.clear()
        self._alive.clear()
        self._silent_reported.clear()

    def discount(self, seconds: float) -> None:
        self._deadlines.discount(seconds)
        self._alive = {process: (phase, at + seconds) for process, (phase, at) in self._alive.items()}

    def late(self, now: float) -> list[str]:
        """A sentence for everything that is late and was not reported yet."""
        silent = [found for found in self._silent(now, LATE_SHARE) if found[0] not in self._silent_reported]
        self._silent_reported.update(process for process, _ in silent)
        return [pending.sentence for pending in self._deadlines.late(now)] + [sentence for _, sentence in silent]

    def hung(self, now: float) -> str:
        """Why the replica is to be ended; empty: it is not."""
        for _, sentence in self._silent(now, 1.0):
            return sentence
        return next(
            (self._phases(pending) for pending in self._deadlines.pending(now) if self._to_blame(pending, now)), ""
        )

    def _to_blame(self, pending: Pending, now: float) -> bool:
        waits = bool(self._alive) and all(
            phase == WAITING and now - at <= FRESH_S for phase, at in self._alive.values()
        )
        return not waits or pending.waited_s > PEERS * pending.limit_s

    def _phases(self, pending: Pending) -> str:
        phases = ", ".join(sorted({phase for phase, _ in self._alive.values()}))
        return f"{pending.sentence}, in phase: {phases or 'unknown'}"

    def _silent(self, now: float, share: float) -> list[tuple[int, str]]:
        if not self._deadlines.pending(now, 0.0):
            return []
        return [
            (
                process,
                (
                    f"process {process} has given no sign of life for {now - at:.0f} s (limit {self._silent_s:.0f} s),"
                    f" last in phase: {phase}"
                ),
            )
            for process, (phase, at) in sorted(self._alive.items())
            if now - at > share * self._silent_s
        ]
