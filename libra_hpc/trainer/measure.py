"""Measures the steps of one training replica on this machine: real worker processes, random weights, full batches.

Each batch is `PACKS` micro-batches per pipeline stage, of trajectories of one length; three lengths show what attention
and packing cost. A step is timed from the order to the last process's answer.
"""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from libra_hpc.config.run import RunConfig
from libra_hpc.errors import OperationError
from libra_hpc.models.architecture import check_parallel, read_shape
from libra_hpc.process.visible_devices import engine_environment
from libra_hpc.protocol.codec import FrameBuffer, pack_f32, pack_i32
from libra_hpc.protocol.engine_state import EngineState
from libra_hpc.protocol.trainer import (
    Join,
    Joined,
    Sample,
    StepDone,
    StopWorker,
    ToWorker,
    TrainStep,
    WorkerHeartbeat,
    from_worker,
    to_worker,
)

from .settings import WorkerConfig, algorithm_settings, optimizer_settings, write_config

PACKS = 4
"""Micro-batches per pipeline stage: with fewer the pipeline's bubble dominates."""
SHARES = (8, 2, 1)
"""A trajectory has a micro-batch's tokens over this."""
WARM_UP = 1
"""Steps of each batch before the first timed one."""
LEAST, MOST = 2, 50
"""Timed steps of a batch: a median needs two; more than fifty change nothing."""
START_S = 600.0
"""Longest wait for a process's answer: imports from a cold file system, or a step of the largest batch."""
LEAVE_S = 20.0
QUOTED = 1500
"""Characters of a failed process's log in the error."""

Measured = list[tuple[int, int, list[float]]]
"""(trajectories, tokens of each, seconds of every step) of each batch."""
Report = Callable[[str], None]
Answer = TypeVar("Answer")


class MeasurementReplica:
    """The processes of a replica, and this end of their sockets."""

    def __init__(self, config: RunConfig, folder: Path, **changes: Any) -> None:
        """``changes``: of `WorkerConfig`, in every process."""
        self._folder, self._processes, self._sockets = folder, list[subprocess.Popen[bytes]](), list[socket.socket]()
        self._buffers: list[FrameBuffer] = []
        self._pending: list[list[Any]] = []
        train = config.train
        count = train.tp * train.pp
        environment = engine_environment(os.environ, config.slurm.device, first=0, count=count, threads=train.threads)
        listeners: list[socket.socket] = []
        for rank in range(count):
            path, settings = folder / f"{rank}.sock", folder / f"{rank}.json"
            write_config(msgspec.structs.replace(worker_config(config, rank, folder), **changes), settings)
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            listeners.append(listener)
            listener.bind(str(path))
            listener.listen(1)
            with self._log(rank).open("wb") as log:
                command = [sys.executable, "-m", "libra_hpc.trainer.worker", "--socket", str(path)]
                self._processes.append(
                    subprocess.Popen([*command, "--config", str(settings)], stdout=log, stderr=log, env=environment)
                )
            self._buffers.append(FrameBuffer())
            self._pending.append([])
        try:
            for rank, listener in enumerate(listeners):
                self._sockets.append(self._accepted(listener, rank))
        except BaseException:
            self.end()
            raise
        finally:
            for listener in listeners:
                listener.close()

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def send(self, message: ToWorker) -> None:
        """Send to all processes."""
        for rank, connection in enumerate(self._sockets):
            try:
                connection.sendall(to_worker.frame(message))
            except OSError:
                raise self._failure(rank) from None

    def answer(self, kind: type[Answer]) -> Answer:
        """The answer of rank 0, once every process has answered with a ``kind``."""
        answers: list[Answer] = []
        for rank in range(len(self._sockets)):
            answer = self._next(rank)
            if not isinstance(answer, kind):
                raise OperationError(f"Process {rank} of the replica failed: {getattr(answer, 'what', answer)}.")
            answers.append(answer)
        return answers[0]

    def ask(self, message: ToWorker, kind: type[Answer]) -> Answer:
        self.send(message)
        return self.answer(kind)

    def end(self) -> None:
        """Stop the processes; those that do not obey are killed."""
        for connection in self._sockets:
            try:
                connection.sendall(to_worker.frame(StopWorker()))
            except OSError:
                continue
        # One that has not connected gets no order.
        for process in self._processes[len(self._sockets) :]:
            process.kill()
        for process in self._processes:
            try:
                process.wait(LEAVE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for connection in self._sockets:
            connection.close()

    def _accepted(self, listener: socket.socket, rank: int) -> socket.socket:
        deadline = time.monotonic() + START_S
        listener.settimeout(0.5)
        while time.monotonic() < deadline:
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                if self._processes[rank].poll() is not None:
                    break
                continue
            connection.settimeout(START_S)
            return connection
        raise self._failure(rank)

    def _next(self, rank: int) -> Any:
        while not self._pending[rank]:
            try:
                chunk = self._sockets[rank].recv(1 << 20)
            except OSError:
                # Also a timeout: the process hangs.
                chunk = b""
            if not chunk:
                raise self._failure(rank)
            messages = [from_worker.decode(body) for body in self._buffers[rank].feed(chunk)]
            self._pending[rank] += [message for message in messages if not isinstance(message, WorkerHeartbeat)]
        return self._pending[rank].pop(0)

    def _failure(self, rank: int) -> OperationError:
        text = self._log(rank).read_text(errors="replace").strip()
        return OperationError(f"Process {rank} of the replica ended or hangs: {text[-QUOTED:] or 'its log is empty'}")

    def _log(self, rank: int) -> Path:
        return self._folder / f"{rank}.log"


def worker_config(config: RunConfig, rank: int, folder: Path) -> WorkerConfig:
    """One process of the replica that ``config`` describes, with random weights."""
    return WorkerConfig(
        model_dir=config.model.path,
        world_rendezvous=str(folder / "world"),
        start_dir="",
        device=config.slurm.device,
        device_index=rank,
        dtype=config.model.dtype,
        tp=config.train.tp,
        pp=config.train.pp,
        rank=rank,
        # No update moves the random weights far from where they are finite.
        optimizer=msgspec.structs.replace(optimizer_settings(config), lr=1e-9),
        algorithm=msgspec.structs.replace(algorithm_settings(config), kl_coef=0.0),
        micro_tokens=config.train.micro_tokens,
        recompute=config.train.recompute,
        threads=config.train.threads,
        seed=config.run.seed,
        random_weights=True,
    )


def batches(micro_tokens: int, pp: int, longest: int) -> list[tuple[int, int]]:
    """(trajectories, tokens of each) of the batches to measure, short trajectories first."""
    contexts = sorted({max(8, min(micro_tokens // share, longest)) for share in SHARES})
    return [(PACKS * pp * max(1, micro_tokens // context), context) for context in contexts]


def measure_training(config: RunConfig, seconds: float, report: Report = lambda what: None) -> Measured:
    """Run steps for about ``seconds`` in all; raises `UserError` for a model that cannot be trained so,
    `OperationError` when a process fails."""
    shape = read_shape(Path(config.model.path))
    check_parallel(shape, config.train.tp, config.train.pp)
    found: Measured = []
    planned = batches(config.train.micro_tokens, config.train.pp, shape.max_positions)
    with tempfile.TemporaryDirectory(prefix="libra-train-") as name:
        replica = MeasurementReplica(config, Path(name))
        try:
            report("starting the replica")
            replica.answer(EngineState)
            replica.ask(Join(0, 0, 1, ""), Joined)
            step = 0
            for trajectories, context in planned:
                samples = random_samples(trajectories, context, shape.vocab)
                begin, taken = time.monotonic(), list[float]()
                while len(taken) < WARM_UP + LEAST or (
                    time.monotonic() - begin < seconds / len(planned) and len(taken) < MOST
                ):
                    step += 1
                    report(f"{trajectories} x {context:,} tokens, step {len(taken) + 1}")
                    before = time.monotonic()
                    replica.ask(TrainStep(step, 0, (samples,), (trajectories * (context - 1),)), StepDone)
                    taken.append(time.monotonic() - before)
                found.append((trajectories, context, taken[WARM_UP:]))
        finally:
            replica.end()
    return found


def random_samples(count: int, context: int, vocab: int) -> tuple[Sample, ...]:
    """Trajectories of random tokens; all but the first count in the loss."""
    rng = random.Random(count * context)
    mask, logprobs = bytes([0] + [1] * (context - 1)), pack_f32([0.0] + [-1.0] * (context - 1))
    return tuple(
        Sample(str(i), pack_i32([rng.randrange(vocab) for _ in range(context)]), mask, logprobs, 1.0 - 2.0 * (i % 2))
        for i in range(count)
    )
