"""The simulated Megatron worker process: the loop of the real one, with `TrainCost` instead of the computation.

``python -m libra_hpc.simulated.trainer_process --socket FD --config FILE``

* `TrainStep` or `TrainPortion` that is not of the next step of the current generation, or lacks a part -> refused.
* `Join` -> the core's step; a replica without its weights receives them.
* A step takes what `TrainCost` says of its world; a part that goes ahead takes its computation.
* The first `Join` after standby takes ``wake_s`` longer.
* Start with ``start_dir`` -> the step of that state.
* Unlike the real worker, a member whose peer dies during a step finishes and commits the step.
"""

from __future__ import annotations

import contextlib
import math
import sys
import threading
import time
from array import array
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from libra_hpc.config.node_groups import core_world, elastic_world
from libra_hpc.models.devices import device
from libra_hpc.models.memory import core_layout, world_layout
from libra_hpc.models.shapes import DTYPE_BYTES, model_shape, reference_shape
from libra_hpc.models.train_seconds import HybridWorlds, TrainCost, work_of
from libra_hpc.process.entry import run
from libra_hpc.process.progress import Pulse
from libra_hpc.process.retry import patiently
from libra_hpc.protocol.engine_state import LOAD, EngineReady
from libra_hpc.protocol.trainer import (
    FromWorker,
    Join,
    PortionDone,
    Sample,
    Saved,
    SaveFailed,
    StepDone,
    Tier,
    TrainPortion,
    TrainStep,
)
from libra_hpc.state import state_folders as folders
from libra_hpc.state.store import resolve
from libra_hpc.trainer.link import Arrived, BatchRejected, WorkerLoop, WorkerSocket
from libra_hpc.trainer.settings import WorkerConfig, read_config
from libra_hpc.trainer.shards import loss_tokens_of, tokens_of
from libra_hpc.weights.pieces import WHOLE, Offer

from . import state
from .clock import wait
from .dry_run import modelled

NOTHING = folders.TrainerState(-1, 0)
"""State of a replica without weights."""
NOT_SIMULATED = (
    *("loss", "grad_norm", "entropy", "ratio_truncated", "clipped", "masked", "behaviour_kl", "kl_clamped"),
    "shared_tokens",
)
"""Numbers of a step that are 0."""


class Trainer(WorkerLoop):
    """One process of a replica.  Raises `UserError` for unknown hardware or an unknown model."""

    def __init__(self, config: WorkerConfig, socket: WorkerSocket, begin: float) -> None:
        super().__init__(socket, Pulse(socket.send))
        self._config, self._simulated = config, config.run.simulated
        self._asleep = False
        name, devices, model = modelled(config.run, "hybrid" if config.elastic else "train")
        self._device = device(name, devices or None)
        self._shape = msgspec.structs.replace(model_shape(model), dtype_bytes=DTYPE_BYTES[config.run.model.dtype])
        self._core_dp, self._elastic_dp = core_world(config.run).dp, elastic_world(config.run).dp
        self._generation, self._others = -1, 0
        """The latter: worlds of hybrid nodes in the generation."""
        self._state = NOTHING if config.elastic else folders.TrainerState(0, 0)
        if config.start_dir:
            with self.pulse.phase(LOAD):
                self._state = patiently(lambda: folders.read_state(resolve(Path(config.start_dir))))
        self._ahead: list[tuple[Sample, ...]] = []
        """Parts of the next step that are here."""
        self._ahead_s = 0.0
        self._writer: threading.Thread | None = None
        self._offered = WHOLE
        """The version that was offered last; as a real trainer, it knows what changed since, and no more."""
        self._take(self._simulated.start_s, begin)
        self.pulse.end()
        socket.send(EngineReady(version=self.step))

    @property
    def step(self) -> int:
        return self._state.step

    def _take(self, simulated_s: float, begin: float) -> None:
        """Sleep until ``simulated_s`` after ``begin`` (wall clock)."""
        wait(self.socket.fileno(), begin + simulated_s / self._simulated.speedup - time.monotonic())

    def join(self, message: Join) -> Arrived:
        self._generation, config, begin, self._ahead = -1, self._config, time.monotonic(), []
        first, replica = self._core_dp + (message.rank - 1) * self._elastic_dp, config.world.degrees.replica
        place, tensor_rank = divmod(config.rank, replica)
        with self.pulse.waiting():
            core = state.meet(
                f"{message.rendezvous}.{tensor_rank}",
                position=place + first * config.elastic,
                size=self._core_dp + (message.size - 1) * self._elastic_dp,
                own=self._state,
                timeout_s=config.join_timeout_s,
                interrupted=self.socket.interrupted,
            )
        received, simulated_s = 0, self._simulated.wake_s if self._asleep else 0.0
        if core.step not in (self.step, message.version):
            received = self._shape.weight_bytes // replica
            simulated_s += received / self._device.inter_bytes_s
        self._take(simulated_s, begin)
        self._asleep = False
        self._state, self._generation, self._others = core, message.generation, message.size - 1
        return Arrived(received)

    def _check(self, message: TrainPortion | TrainStep, before: int) -> None:
        """Raise `BatchRejected` unless ``before`` parts of this next step are here; with 0, drop those that are."""
        step = self.step
        self._ahead = self._ahead if before else []
        if message.generation != self._generation or message.step != step + 1 or before != len(self._ahead):
            self._generation, was = -1, self._generation
            raise BatchRejected(
                f"this replica is at step {step} in generation {was}, it cannot run step {message.step} of generation"
                f" {message.generation}"
            )

    def _seconds(self, *parts: tuple[Sample, ...]) -> tuple[float, float, float]:
        """Seconds of a step with these samples of its world: computation, exchange of gradients and weights, update."""
        lengths = [(tokens_of(sample), loss_tokens_of(sample)) for part in parts for sample in part]
        if not lengths:
            return 0.0, 0.0, 0.0
        run, world = self._config.run, self._config.world
        work = work_of(lengths, minibatches=run.algorithm.minibatches, reference=reference_shape(run, self._shape))
        cost = TrainCost(self._shape, self._device, world.processes, work)
        times = cost.time(world_layout(run, world)).parts
        exchange_s = cost.time(core_layout(run), HybridWorlds(self._others, self._elastic_dp)).parts["exchange"]
        reduce_s, optimizer_s = exchange_s + times.pop("dp", 0.0), times.pop("optimizer")
        return sum(times.values()), reduce_s, optimizer_s

    def portion(self, message: TrainPortion) -> PortionDone:
        begin = time.monotonic()
        self._check(message, message.portion)
        seconds, _, _ = self._seconds(message.samples)
        self._take(seconds, begin)
        self._ahead_s = seconds + (self._ahead_s if self._ahead else 0.0)
        self._ahead.append(message.samples)
        return PortionDone(message.step, message.generation, message.portion)

    def train(self, message: TrainStep) -> StepDone:
        begin = time.monotonic()
        self._check(message, message.portions)
        compute_s, reduce_s, optimizer_s = self._seconds(*message.minibatches)
        self._take(compute_s + reduce_s + optimizer_s, begin)
        compute_s += self._ahead_s if self._ahead else 0.0
        parts, totals = (*self._ahead, *message.minibatches), (*[None] * len(self._ahead), *message.divisors)
        samples: list[Sample] = []
        self._ahead = []
        skipped = updates = 0
        finite = True
        for part, total in zip(parts, totals, strict=True):
            samples += part
            finite = finite and all(math.isfinite(sample.advantage) for sample in part)
            if total is not None:
                skipped, updates, finite = skipped + (not finite), updates + (finite and total > 0), True
        self._state = folders.TrainerState(message.step, self._state.updates + updates)
        gaps = _engine_gaps(samples)
        gap = sum(gap for gap, _ in gaps.values()) / max(1, sum(count for _, count in gaps.values()))
        return StepDone(
            message.step,
            message.generation,
            numbers={
                **dict.fromkeys(NOT_SIMULATED, 0.0),
                "ratio_mean": 1.0,
                "logprob_gap": gap,
                "skipped": skipped,
                "trained_tokens": sum(map(tokens_of, samples)),
                "loss_tokens": sum(map(loss_tokens_of, samples)),
                "train_s": (compute_s + optimizer_s) / self._simulated.speedup,
                "reduce_s": reduce_s / self._simulated.speedup,
            },
            engine_gaps=gaps,
        )

    def offer(self, folder: Path, version: int, base: int) -> tuple[Offer, int]:
        base = base if base == self._offered else WHOLE
        offered = state.offer(folder, version, base, self._config.rank)
        self._offered = version
        return offered

    def copy(self, folder: Path, tier: Tier) -> Callable[[], None]:
        if self._writer is not None:
            self._writer.join()  # there is one copy of the state in host memory
        self._writer = threading.Thread(target=self._save_copy, args=(folder, tier, self._state), daemon=True)
        return self._writer.start

    def standby(self) -> None:
        self._generation, self._asleep = -1, True
        if self._config.elastic:
            self._state = NOTHING

    def _save_copy(self, folder: Path, tier: Tier, copied: folders.TrainerState) -> None:
        """Write a state and answer, in a thread."""
        answer: FromWorker
        files, begin = folders.Manifest(), time.monotonic()
        try:
            if tier == "snapshot":
                state.export(folder / f"snapshot-{self._config.rank:05d}.safetensors", copied.step)
                (folder / folders.STATE_FILE).write_bytes(msgspec.json.encode(copied))
            elif self._config.rank == 0:
                files = state.write(folder, copied.step, copied.updates)
            answer = Saved(str(folder), copied.step, time.monotonic() - begin, files, tier)
        except OSError as error:
            answer = SaveFailed(str(folder), copied.step, str(error), tier)
        with contextlib.suppress(OSError):
            self.written(answer)


def _engine_gaps(samples: Iterable[Sample]) -> dict[int, tuple[float, int]]:
    """`StepDone.engine_gaps`: simulated engines are sure of each token, so what is not 0 is a gap."""
    found: dict[int, tuple[float, int]] = {}
    for sample in samples:
        mask, off = sample.loss_mask, array("f", sample.logprobs)
        zero = sample.logprobs.count(0) == len(sample.logprobs)
        for number in set(mask) - {0}:
            gap = 0.0 if zero else sum(abs(value) for value, one in zip(off, mask, strict=True) if one == number)
            before = found.get(number, (0.0, 0))
            found[number] = before[0] + gap, before[1] + mask.count(number)
    return found


def work(link: int, path: Path) -> int:
    begin = time.monotonic()
    with contextlib.suppress(EOFError, ConnectionError):
        Trainer(read_config(path), WorkerSocket(link), begin).run()
    return 0


if __name__ == "__main__":
    sys.exit(run("libra_hpc.simulated.trainer_process", work))
