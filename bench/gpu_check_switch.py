"""The two switches of a node between training and rollout, and new weights in an engine, on one device.

One vLLM engine and one training replica without optimizer share the device, as on a hybrid node: one is in use, the
other in standby. The exchange of a replica with the core is not measured; it needs a second device.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from bench.gpu_check_steps import Figures, Setting
from bench.gpu_model import memory_field, random_model
from bench.weights import Versions
from libra_hpc.annexes.calibrate.measure_steps import Calibrator, MeasurementPlan
from libra_hpc.annexes.calibrate.measure_training import MeasurementReplica, random_samples
from libra_hpc.config.load import validate
from libra_hpc.engine.offline import OfflineEngine
from libra_hpc.engine.settings import alone
from libra_hpc.engine.update.staged_update import POLL_S
from libra_hpc.errors import OperationError
from libra_hpc.models.devices import Device
from libra_hpc.models.memory import TrainLayout, train_memory
from libra_hpc.models.shapes import ModelShape
from libra_hpc.models.step_times.lookup import lookup
from libra_hpc.models.step_times.measured import StepPoint
from libra_hpc.protocol.engine import UpdateWeights
from libra_hpc.protocol.engine_state import EngineState
from libra_hpc.protocol.trainer import Freed, Join, Joined, Standby, StepDone, TrainStep

if TYPE_CHECKING:
    from libra_hpc.engine.core import RolloutEngine

ROUNDS = 2
"""Switches there and back of which medians are taken: each reads the weights three times."""
PROMPT = 64
"""Tokens of the prompt of every sequence of the decode measurement."""
STEP_TOKENS = 512
"""Of the one trajectory of the first steps after a switch to training."""
FEW = 1e-9
"""Share of the elements that change from round to round."""
CHANGED = 0.0075
"""The same, of a step at a learning rate of 1e-6."""
GB = 1e9
FIRST, LATER = "  first step after it over a later one", "  later step, s"
HELD = "memory that training holds and standby frees, GB"
Round = dict[str, float]
"""One switch to training and back: figures by name, seconds from an order to its answer."""


class SharedDevice:
    """The engine in this process, the replica in one of its own."""

    def __init__(self, engine: OfflineEngine, replica: MeasurementReplica, model: Path, vocab: int) -> None:
        self._engine, self._replica, self._vocab = engine, replica, vocab
        self._version = self._step = 0
        (scratch := model / "image").mkdir()
        self._versions = Versions(scratch, model)
        self._versions.bring(0)
        self._image = str(self._versions.image.path)

    def round(self) -> Round:
        """To training, two steps, to rollout."""
        engine, replica = self._engine.engine, self._replica
        frees = seconds_of(engine.sleep)
        self._step = self._version = self._version + 1
        self._versions.bring(self._version, FEW)
        # Memory, and the weights that this node has for rollout.
        join = Join(self._version, 1, 1, "", weights=self._image, version=self._version)
        joins = seconds_of(lambda: replica.ask(join, Joined))
        first, later = self._run(), self._run()
        held = held_bytes(replica)

        freed = seconds_of(lambda: replica.ask(Standby(), Freed))
        held -= held_bytes(replica)
        update = UpdateWeights(self._image, self._version)
        wakes = seconds_of(engine.wake)
        # Steps of an engine overlap it.
        staged = seconds_of(lambda: stage(engine, update))
        applied = engine.apply(update).seconds
        self._version += 1
        changes = self._versions.offer(self._version, CHANGED)
        update = UpdateWeights(self._image, self._version, (changes,))
        by_index = seconds_of(lambda: stage(engine, update))
        return {
            "switch to training, s": frees + joins,
            "  engine frees its memory, s": frees,
            "  replica takes memory and weights, s": joins,
            FIRST: first,
            LATER: later,
            "switch to rollout, s": freed + wakes + staged + applied,
            "  replica frees its memory, s": freed,
            "  engine takes memory again, s": wakes,
            "  weights staged, s": staged,
            f"  {self._versions.dense / GB:.2f} GB of weights applied, s": applied,
            f"{CHANGED:.2%} of the weights staged by index, s": by_index,
            "  applied, s": engine.apply(update).seconds,
            HELD: held / GB,
        }

    def _run(self) -> float:
        """Seconds of forward and backward pass of one trajectory: the update is the core's."""
        self._step += 1
        samples = random_samples(1, STEP_TOKENS, self._vocab)
        order = TrainStep(self._step, self._version, (samples,), (STEP_TOKENS - 1,))
        return seconds_of(lambda: self._replica.ask(order, StepDone))


def stage(engine: RolloutEngine, update: UpdateWeights) -> None:
    engine.check(update)
    while not engine.staged():
        time.sleep(POLL_S)


def seconds_of(work: Callable[[], object]) -> float:
    begin = time.monotonic()
    work()
    return time.monotonic() - begin


def held_bytes(replica: MeasurementReplica) -> int:
    """Bytes in use on the device by all processes; without a GPU the replica's own memory."""
    import torch

    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info(0)
        return total - free
    return own_memory(replica)


def own_memory(replica: MeasurementReplica) -> int:
    """Bytes of anonymous memory of the first process: without what it shares with others, or has given back."""
    pid = replica.pids[0]
    return memory_field(pid, "RssAnon") - memory_field(pid, "LazyFree", "smaps_rollup")


def switches(setting: Setting, figures: Figures) -> None:
    """Measure; raises `OperationError` when engine or replica fail."""
    hardware, rounds = setting.hardware(), list[Round]()
    shape = setting.shape(hardware)
    with tempfile.TemporaryDirectory(prefix="libra-gpu-") as scratch, random_model(shape, setting.device) as folder:
        sizes = setting.sizes
        limits = {
            "max_num_seqs": sizes.sequences,
            "max_model_len": sizes.max_model_len,
            "kv_cache_mb": sizes.kv_cache_mb,
        }
        config = alone(str(folder), setting.device, dtype="bfloat16", rollout=limits)
        # First the engine: vLLM starts only where most of the device is free.
        with OfflineEngine(config) as engine:
            figures.add("engine's start, s", engine.engine.start_s)
            count, steps = setting.sizes.sequences, lookup(hardware, shape, 1)
            points = decode(engine, count)
            measured, predicted = (
                1e3 * median(seconds)
                for seconds in ([p.seconds for p in points], [steps.step_s(count, p.kv_tokens) for p in points])
            )
            figures.add(f"decode step of {count} sequences, ms", measured, predicted)
            engine.engine.sleep()
            replica = start_replica(setting, folder, Path(scratch))
            try:
                replica.answer(EngineState)
                replica.ask(Standby(), Freed)
                device = SharedDevice(engine, replica, folder, shape.vocab)
                # The first switch fills caches, and finds the engine in standby.
                device.round()
                for _ in range(ROUNDS):
                    rounds.append(device.round())
                # The engine serves again, or this raises.
                decode(engine, count)
            finally:
                if rounds:
                    show(rounds, replica_bytes(shape, hardware), figures)
                replica.end()


def replica_bytes(shape: ModelShape, hardware: Device) -> float:
    """Of a replica without optimizer after a step, by the memory model."""
    layout = TrainLayout(tp=1, pp=1, cp=1, ep=1, dp=1, micro_tokens=STEP_TOKENS, elastic=True)
    memory = train_memory(shape, layout, hardware, micro_batches=1, pack_tokens=STEP_TOKENS)
    return memory.total - memory.workspace


def show(rounds: list[Round], predicted_bytes: float, figures: Figures) -> None:
    """Add the medians of ``rounds``; ``predicted_bytes``: what training holds."""
    middle = {name: median(one[name] for one in rounds) for name in rounds[0]}
    # A ratio of medians: one of two single steps has the noise of both.
    middle[FIRST] /= middle.pop(LATER)
    for name, value in middle.items():
        figures.add(name, value, predicted_bytes / GB if name == HELD else None)


def decode(engine: OfflineEngine, count: int) -> list[StepPoint]:
    """Steps in which ``count`` sequences decode; raises `OperationError` without any."""
    points = Calibrator(engine).measure([MeasurementPlan(decodes=count, length=PROMPT)])
    if not points:
        raise OperationError(f"The engine never had {count} sequences in one decode step.")
    return points


def start_replica(setting: Setting, model: Path, folder: Path) -> MeasurementReplica:
    """The training process of a hybrid node: no optimizer, its weights from a file."""
    sections = {
        "model": {"path": str(model), "dtype": "bfloat16"},
        "slurm": {"device": setting.device},
        "train": {"tp": 1, "pp": 1, "threads": 1, "micro_tokens": STEP_TOKENS},
    }
    config = validate(sections)
    return MeasurementReplica(config, folder, elastic=True, random_weights=False)
