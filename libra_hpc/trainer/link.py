"""A worker process's end of the socket to its agent, and the loop that obeys what comes there.

- `Pulse` reports the process's phase once a second: each order is one, and within it what touches a saved state.
- While the process waits for peers, `interrupted` reads orders that end the wait; they are handled in order later.
- An order fails (`PeerLost`, `BatchRejected`, `OSError`, another step) -> its answer has the reason; the loop goes on.

Needs no torch: the simulated trainer uses it too.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from libra_hpc.process.progress import Pulse
from libra_hpc.protocol.codec import EngineSocket
from libra_hpc.protocol.engine_state import JOIN, OFFER, PORTION, STANDBY, STEP, WRITE
from libra_hpc.protocol.trainer import (
    Freed,
    FromWorker,
    Join,
    Joined,
    Offered,
    OfferFailed,
    OfferWeights,
    PortionDone,
    SaveFailed,
    SaveStarted,
    SaveState,
    Standby,
    StepDone,
    StepFailed,
    Tier,
    TrainPortion,
    TrainStep,
    WorkerFailed,
    from_worker,
    to_worker,
)
from libra_hpc.weights.pieces import Offer


class WorkerSocket(EngineSocket[FromWorker]):
    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, to_worker, from_worker)
        self._ahead: deque[Any] = deque()

    def receive(self, timeout: float | None = None) -> Any:
        """Return the next message; those that `interrupted` read come first."""
        return self._ahead.popleft() if self._ahead else super().receive(timeout)

    def interrupted(self) -> bool:
        """Whether an order arrived that ends an unfinished join or step; raises `EOFError` when the agent is gone."""
        while (message := super().receive(0.0)) is not None:
            self._ahead.append(message)
        return any(isinstance(message, Join | Standby) for message in self._ahead)


PHASES: dict[type, str] = {Join: JOIN, TrainPortion: PORTION, OfferWeights: OFFER, Standby: STANDBY}


def _phase(message: Any) -> str:
    """The phase of an order; a step that is done again computes the parts that came ahead of it before."""
    if isinstance(message, TrainStep):
        parts = message.divisors.count(None)
        return f"{STEP} with {parts} earlier parts" if parts else STEP
    return PHASES.get(type(message), "order")


class Arrived(NamedTuple):
    """What a join took, as in `Joined`."""

    received_bytes: int
    memory_s: float = 0.0
    weights_s: float = 0.0


class PeerLost(Exception):
    """An exchange with the core or the replicas failed: a member died, left, or was late."""


class BatchRejected(Exception):
    """The samples of a step cannot be trained on; the state is unchanged."""


class WorkerLoop(ABC):
    """A worker process, whatever computes."""

    def __init__(self, socket: WorkerSocket, pulse: Pulse) -> None:
        self.socket, self.pulse = socket, pulse

    @property
    @abstractmethod
    def step(self) -> int:
        """Step of the state that this process has."""

    @abstractmethod
    def join(self, message: Join) -> Arrived:
        """Join a generation. Raises `PeerLost`, in no generation."""

    @abstractmethod
    def portion(self, message: TrainPortion) -> PortionDone:
        """Add the gradient of a part of the next batch; raises `BatchRejected`, outside the generation."""

    @abstractmethod
    def train(self, message: TrainStep) -> StepDone:
        """Commit a step; raises `PeerLost` or `BatchRejected`, with the state of before."""

    @abstractmethod
    def offer(self, folder: Path, version: int, base: int) -> tuple[Offer, int]:
        """Write this process's offer of the present weights; returns it and the elements owned. Raises `OSError`."""

    @abstractmethod
    def copy(self, folder: Path, tier: Tier) -> Callable[[], None]:
        """Copy the state; returns what has a thread write it and answer. Raises `OSError`."""

    @abstractmethod
    def standby(self) -> None:
        """Leave the generation, and free what `join` can bring again."""

    def run(self) -> None:
        """Obey orders; raises `EOFError` once the agent has closed the socket."""
        while True:
            message = self.socket.receive()
            with self.pulse.phase(_phase(message)):
                answer = self._obey(message, time.monotonic())
                self.socket.send_many([answer] if answer is not None else [])

    def _obey(self, message: Any, begin: float) -> FromWorker | None:
        match message:
            case TrainPortion(step=step, generation=generation, portion=portion):
                try:
                    return self.portion(message)
                except BatchRejected as error:
                    return PortionDone(step, generation, portion, str(error))
            case TrainStep():
                try:
                    return self.train(message)
                except (PeerLost, BatchRejected) as error:
                    return StepFailed(message.step, message.generation, str(error))
            case Join(generation=generation, attempt=attempt):
                try:
                    arrived = self.join(message)
                except PeerLost as lost:
                    what = f"generation {generation} did not form: {lost}"
                    return WorkerFailed(what, fatal=False, generation=generation, attempt=attempt)
                return Joined(
                    generation,
                    self.step,
                    arrived.received_bytes,
                    time.monotonic() - begin,
                    attempt=attempt,
                    memory_s=arrived.memory_s,
                    weights_s=arrived.weights_s,
                )
            case OfferWeights():
                return self._offer(message, begin)
            case SaveState():
                return self._save(message, begin)
            case Standby():
                self.standby()
                return Freed(time.monotonic() - begin)
        return None

    def _offer(self, message: OfferWeights, begin: float) -> FromWorker:
        version = message.version
        try:
            self._check_step(version, "offer")
            offer, total = self.offer(Path(message.folder), version, message.base)
        except OSError as error:
            return OfferFailed(version, f"{message.folder}: {error.strerror}" if error.strerror else str(error))
        changed = sum(piece.changed for piece in offer.pieces)
        return Offered(version, offer.base, offer.writer, offer.size, changed, total, time.monotonic() - begin)

    def _save(self, message: SaveState, begin: float) -> FromWorker | None:
        write, failure = None, ""
        try:
            self._check_step(message.step, "save")
            with self.pulse.phase(message.tier):
                write = self.copy(Path(message.folder), message.tier)
        except OSError as error:
            failure = str(error)
        self.socket.send(SaveStarted(message.folder, time.monotonic() - begin))
        if write is None:
            return SaveFailed(message.folder, message.step, failure, message.tier)
        self.pulse.begin(WRITE)
        write()
        return None

    def written(self, answer: FromWorker) -> None:
        """Send the answer of the thread that writes."""
        self.pulse.end(WRITE)
        self.socket.send(answer)

    def _check_step(self, wanted: int, what: str) -> None:
        if wanted != self.step:
            raise OSError(f"this replica is at step {self.step}, it cannot {what} step {wanted}")
