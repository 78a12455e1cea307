"""The two switches of a node between training and rollout, and new weights in an engine, on one device.

One vLLM engine and one training replica without optimizer share the device, as on a hybrid node: one is in use, the
other in standby. The exchange of a replica with the core is not measured; it needs a second device.
"""

from __future__ import annotations

import random
import tempfile
import time
from pathlib import Path
from statistics import median

import msgspec

from bench.gpu_check_setting import Figures, Setting
from bench.gpu_model import random_model
from libra_hpc.config.run import RunConfig
from libra_hpc.engine.offline import OfflineEngine
from libra_hpc.engine.settings import EngineConfig
from libra_hpc.errors import OperationError
from libra_hpc.models.devices import Device
from libra_hpc.models.memory import TrainLayout, train_memory
from libra_hpc.models.shapes import ModelShape
from libra_hpc.models.step_times.lookup import lookup
from libra_hpc.protocol.codec import pack_i32
from libra_hpc.protocol.rollout import Generate, UpdateWeights
from libra_hpc.protocol.trainer import Export, ExportFailed, Join, Joined, Standby, StepDone, TrainStep, WorkerReady
from libra_hpc.trainer.measure import MeasurementReplica, random_samples
from libra_hpc.weights.checksum import file_crc32

ROUNDS = 2
"""Switches there and back of which medians are taken: each reads the weights three times."""
PROMPT, DECODED = 64, 64
"""Tokens of every sequence of the decode measurement."""
STEP_TOKENS = 512
"""Of the one trajectory of the first steps after a switch to training."""
GB = 1e9


class Round(msgspec.Struct, frozen=True):
    """One switch to training and back; seconds from an order to its answer."""

    engine_frees_s: float
    replica_joins_s: float
    """Memory, and the weights that this node has for rollout."""
    first_step_s: float
    later_step_s: float
    training_bytes: int
    """On the device after the steps; next, with both in standby."""
    standby_bytes: int
    replica_frees_s: float
    engine_wakes_s: float
    checked_s: float
    """Checksum and shapes of the weight file, which steps of an engine overlap."""
    applied_s: float

    @property
    def to_training_s(self) -> float:
        return self.engine_frees_s + self.replica_joins_s

    @property
    def to_rollout_s(self) -> float:
        return self.replica_frees_s + self.engine_wakes_s + self.checked_s + self.applied_s


class SharedDevice:
    """The engine in this process, the replica in one of its own."""

    def __init__(self, engine: OfflineEngine, replica: MeasurementReplica, weights: Path, vocab: int) -> None:
        self._engine, self._replica, self._weights, self._vocab = engine, replica, weights, vocab
        self._crc, self._version, self._step = file_crc32(weights), 0, 0

    def round(self) -> Round:
        """To training, two steps, to rollout."""
        begin = time.monotonic()
        self._engine.engine.sleep()
        slept = time.monotonic()
        self._version += 1
        join = Join(self._version, 1, 1, "", weights=str(self._weights), version=self._version)
        self._replica.ask(join, Joined)
        joined = time.monotonic()
        self._step = self._version
        first, later = self._run(), self._run()
        training = held_bytes(self._replica)
        ordered = time.monotonic()
        self._replica.send(Standby())
        # A standby has no answer. There is no such version to export, so the refusal comes right after the standby.
        self._replica.ask(Export("", -2), ExportFailed)
        freed = time.monotonic()
        standby = held_bytes(self._replica)
        begin_wake = time.monotonic()
        self._engine.engine.wake()
        woken = time.monotonic()
        update = UpdateWeights(str(self._weights), self._version, self._crc)
        self._engine.engine.check(update)
        checked = time.monotonic()
        applied_s = self._engine.engine.apply(update).seconds
        return Round(
            engine_frees_s=slept - begin,
            replica_joins_s=joined - slept,
            first_step_s=first,
            later_step_s=later,
            training_bytes=training,
            standby_bytes=standby,
            replica_frees_s=freed - ordered,
            engine_wakes_s=woken - begin_wake,
            checked_s=checked - woken,
            applied_s=applied_s,
        )

    def _run(self) -> float:
        """Seconds of forward and backward pass of one trajectory: the update is the core's."""
        self._step += 1
        samples = random_samples(1, STEP_TOKENS, self._vocab)
        begin = time.monotonic()
        self._replica.ask(TrainStep(self._step, self._version, (samples,), (STEP_TOKENS - 1,)), StepDone)
        return time.monotonic() - begin


def held_bytes(replica: MeasurementReplica) -> int:
    """Bytes in use on the device by all processes; without a GPU the replica's own memory."""
    import torch

    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info(0)
        return total - free
    for line in Path(f"/proc/{replica.pids[0]}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise OSError("this kernel does not tell a process's anonymous memory")


def switches(setting: Setting, figures: Figures) -> None:
    """Measure; raises `OperationError` when engine or replica fail."""
    hardware, rounds = setting.hardware(), list[Round]()
    shape = setting.shape(hardware)
    with tempfile.TemporaryDirectory(prefix="libra-gpu-") as scratch, random_model(shape, setting.device) as folder:
        config = EngineConfig(
            model=str(folder),
            dtype="bfloat16",
            max_model_len=setting.max_model_len,
            max_num_seqs=setting.sequences,
            kv_cache_mb=setting.kv_cache_mb,
            threads=1,
            device=setting.device,
        )
        # First the engine: vLLM starts only where most of the device is free.
        with OfflineEngine(config) as engine:
            figures.add("engine's start, s", engine.engine.ready.start_s)
            count, kv_tokens = setting.sequences, setting.sequences * (PROMPT + DECODED // 2)
            decode(engine, "warm-up", count)
            seconds, predicted = decode(engine, "timed", count), lookup(hardware, shape, 1).step_s(count, kv_tokens)
            figures.add(f"decode step of {count} sequences, ms", 1e3 * seconds, 1e3 * predicted)
            engine.engine.sleep()
            replica = start_replica(setting, folder, Path(scratch))
            try:
                replica.answer(WorkerReady)
                replica.send(Standby())
                device = SharedDevice(engine, replica, folder / "model.safetensors", shape.vocab)
                # The first switch fills caches, and finds the engine in standby.
                device.round()
                for _ in range(ROUNDS):
                    rounds.append(device.round())
                # The engine serves again, or this raises.
                decode(engine, "after", count)
            finally:
                if rounds:
                    show(rounds, shape.weight_bytes, replica_bytes(shape, hardware), figures)
                replica.end()


def replica_bytes(shape: ModelShape, hardware: Device) -> float:
    """Of a replica without optimizer after a step, by the memory model."""
    layout = TrainLayout(tp=1, pp=1, cp=1, ep=1, dp=1, micro_tokens=STEP_TOKENS, elastic=True)
    memory = train_memory(shape, layout, hardware, micro_batches=1, pack_tokens=STEP_TOKENS)
    return memory.total - memory.workspace


def show(rounds: list[Round], weight_bytes: int, predicted_bytes: float, figures: Figures) -> None:
    """Add the medians of ``rounds``; ``predicted_bytes``: what training holds."""

    def middle(name: str) -> float:
        return median(float(getattr(one, name)) for one in rounds)

    figures.add("switch to training, s", middle("to_training_s"))
    figures.add("  engine frees its memory, s", middle("engine_frees_s"))
    figures.add("  replica takes memory and weights, s", middle("replica_joins_s"))
    figures.add("  first step after it over a later one", middle("first_step_s") / middle("later_step_s"))
    figures.add("switch to rollout, s", middle("to_rollout_s"))
    figures.add("  replica frees its memory, s", middle("replica_frees_s"))
    figures.add("  engine takes memory again, s", middle("engine_wakes_s"))
    figures.add("  weight file checked, s", middle("checked_s"))
    figures.add(f"  {weight_bytes / GB:.2f} GB of weights applied, s", middle("applied_s"))
    freed = median(one.training_bytes - one.standby_bytes for one in rounds)
    figures.add("memory that training holds and standby frees, GB", freed / GB, predicted_bytes / GB)


def decode(engine: OfflineEngine, name: str, count: int) -> float:
    """Seconds of one step while ``count`` sequences decode, their prompts computed before.

    Raises `OperationError` when one of them is not generated.
    """
    before, draws = computed_tokens(engine), random.Random(name)
    for i in range(count):
        prompt = [draws.randrange(3, 96) for _ in range(PROMPT)]
        engine.submit(Generate(f"{name}-{i}", pack_i32(prompt), DECODED))
    answers, seconds = engine.poll(), list[float]()
    while engine.pending:
        timed = computed_tokens(engine) - before >= count * PROMPT
        begin = time.monotonic()
        answers += engine.poll()
        seconds += [time.monotonic() - begin] if timed else []
    if not seconds or any(answer.finish != "length" for answer in answers):
        raise OperationError(f"The engine generated {[answer.finish for answer in answers]} of {count} sequences.")
    return median(seconds)


def computed_tokens(engine: OfflineEngine) -> int:
    """Tokens of prompts so far."""
    stats = engine.engine.stats()
    return stats.prefill_tokens + stats.cached_tokens


def start_replica(setting: Setting, model: Path, folder: Path) -> MeasurementReplica:
    """The training process of a hybrid node: no optimizer, its weights from a file."""
    base = RunConfig()
    config = base.model_copy(
        update={
            "model": base.model.model_copy(update={"path": str(model), "dtype": "bfloat16"}),
            "slurm": base.slurm.model_copy(update={"device": setting.device}),
            "train": base.train.model_copy(update={"tp": 1, "pp": 1, "threads": 1, "micro_tokens": STEP_TOKENS}),
        }
    )
    return MeasurementReplica(config, folder, core_dp=1, elastic=True, random_weights=False)
