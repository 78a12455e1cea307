"""Measures the steps of one training replica on this machine: real worker processes, random weights, full batches.

Each batch is `PACKS` micro-batches per pipeline stage, of trajectories of one length; three lengths show what attention
and packing cost. A step is timed from the order to the last process's answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from libra_hpc.config.run import RunConfig
from libra_hpc.errors import OperationError
from libra_hpc.models.architecture import read_shape
from libra_hpc.process.child import Child
from libra_hpc.process.child_environment import engine_environment
from libra_hpc.protocol.codec import pack_f32, pack_i32
from libra_hpc.protocol.engine_state import Doing, EngineReady
from libra_hpc.protocol.trainer import Join, Joined, Sample, StepDone, ToWorker, TrainStep, from_worker, to_worker
from libra_hpc.trainer.settings import WorkerConfig, write_config

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
    """The processes of a replica, as `libra_hpc.process.child` runs them, for a caller without an event loop."""

    def __init__(self, config: RunConfig, folder: Path, **changes: Any) -> None:
        """``changes``: of `WorkerConfig`, in every process."""
        self._folder, self._loop = folder, asyncio.new_event_loop()
        self._children: list[Child] = []
        self._answers: dict[Child, asyncio.Queue[Any]] = {}
        """Answers of each process; None: it has ended."""
        try:
            self._loop.run_until_complete(self._start(config, changes))
        except BaseException:
            self.end()
            raise

    async def _start(self, config: RunConfig, changes: dict[str, Any]) -> None:
        train = config.train
        count = train.tp * train.pp
        environment = engine_environment(os.environ, config.slurm.device, first=0, count=count, threads=train.threads)
        for rank in range(count):
            settings = self._folder / f"{rank}.json"
            write_config(msgspec.structs.replace(worker_config(config, rank, self._folder), **changes), settings)
            child = Child(
                str(rank),
                outbound=to_worker,
                inbound=from_worker,
                on_message=self._received,
                on_exit=lambda child, code: self._received(child, None),
            )
            self._children.append(child)
            self._answers[child] = asyncio.Queue()
            command = [sys.executable, "-m", "libra_hpc.trainer.worker", "--config", str(settings)]
            await child.start(command, environment, self._log(rank))

    @property
    def pids(self) -> list[int]:
        return [child.pid for child in self._children]

    def send(self, message: ToWorker) -> None:
        for child in self._children:
            child.send(message)

    def answer(self, kind: type[Answer]) -> Answer:
        """The answer of rank 0, once every process has answered with a ``kind``."""
        answers: list[Answer] = []
        for rank, child in enumerate(self._children):
            answer = self._loop.run_until_complete(self._next(child))
            if answer is None:
                text = self._log(rank).read_text(errors="replace").strip()[-QUOTED:]
                raise OperationError(f"Process {rank} of the replica ended or hangs: {text or 'its log is empty'}")
            if not isinstance(answer, kind):
                raise OperationError(f"Process {rank} of the replica failed: {getattr(answer, 'what', answer)}.")
            answers.append(answer)
        return answers[0]

    def ask(self, message: ToWorker, kind: type[Answer]) -> Answer:
        self.send(message)
        return self.answer(kind)

    def end(self) -> None:
        """Stop the processes; those that do not leave are killed."""
        self._loop.run_until_complete(self._stop())
        self._loop.close()

    async def _stop(self) -> None:
        await asyncio.gather(*(child.stop(LEAVE_S) for child in self._children))

    async def _next(self, child: Child) -> Any:
        """Its next message; None when it has ended or hangs."""
        with contextlib.suppress(TimeoutError):
            return await asyncio.wait_for(self._answers[child].get(), START_S)
        return None

    def _received(self, child: Child, message: Any) -> None:
        if not isinstance(message, Doing):
            self._answers[child].put_nowait(message)

    def _log(self, rank: int) -> Path:
        return self._folder / f"{rank}.log"


def worker_config(config: RunConfig, rank: int, folder: Path) -> WorkerConfig:
    """One process of the replica that ``config`` describes, with random weights."""
    node = msgspec.structs.replace(config.components.train, nodes=1)
    alone = config.changed(
        components={"train": node},
        train={"cp": 1, "ep": 1, "etp": 0, "processes": config.train.tp * config.train.pp},
        # No update moves the random weights far from where they are finite.
        optimizer={"lr": 1e-9},
        algorithm={"kl_coef": 0.0, "reference_kl_coef": 0.0},
    )
    return WorkerConfig(
        run=alone, world_rendezvous=str(folder / "world"), device_index=rank, rank=rank, random_weights=True
    )


def batches(micro_tokens: int, pp: int, longest: int) -> list[tuple[int, int]]:
    """(trajectories, tokens of each) of the batches to measure, short trajectories first."""
    contexts = sorted({max(8, min(micro_tokens // share, longest)) for share in SHARES})
    return [(PACKS * pp * max(1, micro_tokens // context), context) for context in contexts]


def measure_training(config: RunConfig, seconds: float, report: Report = lambda what: None) -> Measured:
    """Run steps for about ``seconds`` in all; raises `UserError` for a model that cannot be trained so,
    `OperationError` when a process fails."""
    shape = read_shape(Path(config.model.path))
    found: Measured = []
    planned = batches(config.train.micro_tokens, config.train.pp, shape.max_positions)
    with tempfile.TemporaryDirectory(prefix="libra-train-") as name:
        replica = MeasurementReplica(config, Path(name))
        try:
            report("starting the replica")
            replica.answer(EngineReady)
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
