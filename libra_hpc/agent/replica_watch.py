"""Whether a training replica makes progress: the judgement of its node, from orders, answers and signs of life.

- The replica is serial -> an order counts from when the one before it was answered.
- A process reads, copies or writes a saved state -> storage time, judged by ``storage_s`` alone; orders that wait for
  it do not age. Storage that is slower than usual is reported as late.
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
    Freed,
    Join,
    Joined,
    Offered,
    OfferFailed,
    OfferWeights,
    PortionDone,
    SaveCheckpoint,
    Saved,
    SaveFailed,
    SaveStarted,
    Standby,
    StepDone,
    StepFailed,
    TrainPortion,
    TrainStep,
    WorkerFailed,
    WorkerHeartbeat,
)
from libra_hpc.trainer.link import CHECKPOINT, COMPUTE, STORAGE, WAITING

PEERS = 3.0
"""Limits that a replica may take while it waits for others.

Half: it may be ended before the slow one; double: a lost message holds the run so much longer.
"""
GIVE_UP = 4
"""Storage operations in a row that did not end within ``storage_s``.  Half: two stalls of a file system restart all;
double: two hours without a saved state."""
FRESH_S = 5.0
"""Signs of life come every second; an older one proves nothing about now."""
START, WRITE, PHASE = "start", "write of a checkpoint", "storage phase"
PORTION, STEP = "train portion", "train step"


def order_key(message: Any) -> tuple[str, Hashable] | None:
    """Name and number of an order or of its answer; None: not watched."""
    match message:
        case Join(generation=number, attempt=attempt) | Joined(generation=number, attempt=attempt):
            return "join", (number, attempt)
        case TrainPortion(step=number, portion=portion) | PortionDone(step=number, portion=portion):
            return PORTION, (number, portion)
        case TrainStep(step=number) | StepDone(step=number) | StepFailed(step=number):
            return STEP, number
        case OfferWeights(version=number) | Offered(version=number) | OfferFailed(version=number):
            return "offer", number
        case Standby() | Freed():
            return "standby", 0
        case SaveCheckpoint(step=number) | SaveStarted(step=number):
            return CHECKPOINT, number
        case WorkerFailed(generation=number, attempt=attempt) if number >= 0:
            return "join", (number, attempt)
    return None


class ReplicaWatch:
    def __init__(self, settings: DeadlineLimits, storage_s: float) -> None:
        self._silent_s, self._storage_s = settings.floor_s, storage_s
        self._deadlines = Deadlines(settings)
        self._storage = Deadlines(settings)
        """Its own limits decide what is late."""
        self._storage_at: float | None = None
        """Until when storage time was taken off the orders; None: no process is in such a phase."""
        self._given_up = 0
        self._portions = 0
        """That the last training step has, besides its last one."""
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
            self._take_off_storage(now)
            self._orders.append(key)
            if isinstance(message, TrainStep):
                self._portions = message.divisors.count(None)
            if len(self._orders) == 1:
                self._begin(key, now)

    def _begin(self, key: tuple[str, Hashable], now: float) -> None:
        # A step that is done again has the portions that came ahead of it before.
        portions = self._portions if key[0] == STEP else 0
        own_s = self._deadlines.limit(STEP) + portions * self._deadlines.limit(PORTION) if portions else 0.0
        self._deadlines.begin(key[0], key, now, own_s)

    def answered(self, message: Any, now: float) -> None:
        """The replica answered; a failure's duration does not count."""
        self._take_off_storage(now)
        if isinstance(message, Saved):
            self._storage.end(WRITE, now)
            self._given_up = 0
        elif isinstance(message, SaveFailed):
            self._storage.drop(WRITE)
        key = order_key(message)
        if key is None or key not in self._orders:
            return
        while self._orders[0] != key:
            self._deadlines.drop(self._orders.popleft())
        self._orders.popleft()
        refused = isinstance(message, PortionDone) and bool(message.error)
        if refused or isinstance(message, StepFailed | OfferFailed | WorkerFailed):
            self._deadlines.drop(key)
        else:
            self._deadlines.end(key, now)
        if isinstance(message, SaveStarted):
            self._storage.begin(WRITE, WRITE, now)
        # A phase of before the answer has ended with it.
        self._alive = {
            process: (COMPUTE if phase == key[0] else phase, at) for process, (phase, at) in self._alive.items()
        }
        self._note_phases(now)
        if self._orders:
            self._begin(self._orders[0], now)

    def alive(self, process: int, message: WorkerHeartbeat, now: float) -> None:
        self._take_off_storage(now)
        self._alive[process] = (message.phase, now)
        self._silent_reported.discard(process)
        self._note_phases(now)

    def _take_off_storage(self, now: float) -> None:
        if self._storage_at is not None:
            self._deadlines.discount(now - self._storage_at)
            self._storage_at = now

    def _note_phases(self, now: float) -> None:
        phase = next((phase for phase, _ in self._alive.values() if phase in STORAGE), "")
        if phase and self._storage_at is None:
            self._storage.begin(phase, PHASE, now)
            self._storage_at = now
        elif not phase and self._storage_at is not None:
            self._storage.end(PHASE, now)
            self._storage_at = None

    def give_up(self, now: float) -> str:
        """The replica is ended because it is hung; returns why all ranks are to restart, if so."""
        for pending in self._deadlines.pending(now, 0.0):
            self._deadlines.exceeded(pending.key)
        stored = self._stored(now)
        self._given_up += bool(stored)
        self.clear()
        often = f"{self._given_up} times in a row; raise deadlines.storage_s if the file system needs longer"
        return f"{stored[0]}, {often}" if stored and self._given_up >= GIVE_UP else ""

    def clear(self) -> None:
        self._deadlines.clear()
        self._storage.clear()
        self._storage_at = None
        self._orders.clear()
        self._alive.clear()
        self._silent_reported.clear()

    def discount(self, seconds: float) -> None:
        self._deadlines.discount(seconds)
        self._storage.discount(seconds)
        if self._storage_at is not None:
            self._storage_at += seconds
        self._alive = {process: (phase, at + seconds) for process, (phase, at) in self._alive.items()}

    def late(self, now: float) -> list[str]:
        """A sentence for everything that is late and was not reported yet."""
        silent = [found for found in self._silent(now, LATE_SHARE) if found[0] not in self._silent_reported]
        self._silent_reported.update(process for process, _ in silent)
        self._take_off_storage(now)
        storage = [pending._replace(limit_s=self._storage_s) for pending in self._storage.late(now)]
        return [pending.sentence for pending in (*self._deadlines.late(now), *storage)] + [one for _, one in silent]

    def hung(self, now: float) -> str:
        """Why the replica is to be ended; empty: it is not."""
        for _, sentence in self._silent(now, 1.0):
            return sentence
        self._take_off_storage(now)
        if stored := self._stored(now):
            return stored[0]
        return next(
            (self._phases(pending) for pending in self._deadlines.pending(now) if self._to_blame(pending, now)), ""
        )

    def _stored(self, now: float) -> list[str]:
        overdue = [one._replace(limit_s=self._storage_s) for one in self._storage.pending(now, 0.0)]
        return [self._phases(one) for one in overdue if one.waited_s > one.limit_s]

    def _to_blame(self, pending: Pending, now: float) -> bool:
        waits = bool(self._alive) and all(
            phase == WAITING and now - at <= FRESH_S for phase, at in self._alive.values()
        )
        return not waits or pending.waited_s > PEERS * pending.limit_s

    def _phases(self, pending: Pending) -> str:
        phases = ", ".join(sorted({phase for phase, _ in self._alive.values()}))
        return f"{pending.sentence}, in phase: {phases or 'unknown'}"

    def _silent(self, now: float, share: float) -> list[tuple[int, str]]:
        if not (self._deadlines.pending(now, 0.0) or self._storage.pending(now, 0.0)):
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
