"""The two switches of a node between training and rollout, and new weights in an engine, on one device.

One vLLM engine and one training replica without optimizer share the device, as on a hybrid node: one is in use, the
other in standby. The exchange of a replica with the core is not measured; it needs a second device.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import numpy as np
import torch
from msgspec.structs import replace
from safetensors.torch import load_file

from bench.gpu.model import random_model
from bench.gpu.setting import Figures, Setting, core_layout
from libra_hpc.annexes.calibrate.measure_steps import Calibrator, MeasurementPlan
from libra_hpc.annexes.calibrate.measure_training import MeasurementReplica, random_samples
from libra_hpc.config.load import validate
from libra_hpc.engine.offline import OfflineEngine
from libra_hpc.engine.settings import alone
from libra_hpc.engine.update.staged_update import POLL_S
from libra_hpc.errors import OperationError
from libra_hpc.models.architecture import hf_shapes, read_shape
from libra_hpc.models.memory import train_memory
from libra_hpc.models.step_times.lookup import lookup
from libra_hpc.models.step_times.measured import StepPoint
from libra_hpc.protocol.codec import pack_i32
from libra_hpc.protocol.engine import Generate, UpdateWeights, VersionFiles
from libra_hpc.protocol.engine_state import EngineReady
from libra_hpc.protocol.trainer import Freed, Join, Joined, Standby, StepDone, TrainStep
from libra_hpc.weights.delta import DENSE, dense, marked
from libra_hpc.weights.image import Image
from libra_hpc.weights.pieces import WHOLE, Encoded, TensorBlock, offer_path, payload_path, write_offer
from tests.engine import ahead_on_cpu

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
    """The engine in this process, the replica in one of its own, and an image of the node's weights."""

    def __init__(self, engine: OfflineEngine, replica: MeasurementReplica, model: Path, scratch: Path) -> None:
        self._engine, self._replica, self._shape = engine, replica, read_shape(model)
        self._image, self._version, self._step = Image(scratch, hf_shapes(self._shape), "BF16"), 0, 0
        tensors = load_file(model / "model.safetensors")
        self._bits = {name: one.view(torch.int16).flatten().numpy().copy() for name, one in tensors.items()}
        payload_path(Path(self._bring(1.0).manifests[0])).unlink()

    def _bring(self, share: float) -> VersionFiles:
        """Bring the image to a new version; its offer takes shared memory until it is removed."""
        self._version += 1
        folder, base = self._image.path.parent, WHOLE if share == 1.0 else self._version - 1
        offer = write_offer(folder, self._version, base, "t0.0", self._changed(share))
        manifest = offer_path(folder, self._version, "t0.0")
        self._image.apply(self._version, [(offer, payload_path(manifest).read_bytes())])
        return VersionFiles(self._version, base, (str(manifest),))

    def _changed(self, share: float) -> Iterator[Encoded]:
        """Each tensor with the lowest bit of evenly spaced elements turned; at least of the first."""
        for name, bits in self._bits.items():
            block, changed = TensorBlock(name, 0, 1, bits.size, bits.size), np.zeros(bits.size, np.bool_)
            changed[:: round(1.0 / share)] = True
            bits[changed] ^= 1
            if share > DENSE:
                yield dense(block, "BF16", bits)
            else:
                yield marked(block, "BF16", np.packbits(changed, bitorder="little"), bits)

    def round(self) -> Round:
        """To training, two steps, to rollout."""
        engine, replica, image = self._engine.engine, self._replica, str(self._image.path)
        frees = seconds_of(engine.sleep)
        payload_path(Path(self._bring(FEW).manifests[0])).unlink()
        self._step = self._version
        # Memory, and the weights that this node has for rollout.
        join = Join(self._version, 1, 1, "", weights=image, version=self._version)
        joins = seconds_of(lambda: replica.ask(join, Joined))
        first, later = self._run(), self._run()
        held = held_bytes()

        freed = seconds_of(lambda: replica.ask(Standby(), Freed))
        held -= held_bytes()
        update = UpdateWeights(image, self._version)
        wakes = seconds_of(engine.wake)
        # Steps of an engine overlap it.
        staged = seconds_of(lambda: stage(engine, update))
        applied = engine.apply(update).seconds
        changes = self._bring(CHANGED)
        update = UpdateWeights(image, self._version, (changes,))
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
            "  weights applied, s": applied,
            f"{CHANGED:.2%} of the weights staged by index, s": by_index,
            "  applied, s": engine.apply(update).seconds,
            HELD: held / GB,
        }

    def _run(self) -> float:
        """Seconds of forward and backward pass of one trajectory: the update is the core's."""
        self._step += 1
        samples = random_samples(1, STEP_TOKENS, self._shape.vocab)
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


def held_bytes() -> int:
    """Bytes in use on the device by all processes; 0 without a GPU."""
    if not torch.cuda.is_available():
        return 0
    free, total = torch.cuda.mem_get_info(0)
    return total - free


def switch(setting: Setting, figures: Figures) -> None:
    """Measure; raises `OperationError` when engine or replica fail."""
    hardware, rounds, sizes = setting.hardware(), list[Round](), setting.sizes
    shape, count = setting.shape(hardware), setting.sizes.sequences
    layout = core_layout(STEP_TOKENS)
    memory = train_memory(shape, replace(layout, elastic=True), hardware, micro_batches=1, pack_tokens=STEP_TOKENS)
    limits = {"max_num_seqs": count, "max_model_len": sizes.max_model_len, "kv_cache_mb": sizes.kv_cache_mb}
    with tempfile.TemporaryDirectory(prefix="libra-gpu-") as scratch, random_model(shape, setting.device) as folder:
        (image := folder / "image").mkdir()
        # First the engine: vLLM starts only where most of the device is free.
        config = alone(str(folder), setting.device, dtype="bfloat16", rollout=limits)
        if setting.device == "cpu":
            ahead_on_cpu.prepare(config)
        with OfflineEngine(config) as engine:
            figures.add("engine's start, s", engine.engine.start_s)
            points, steps = decode(engine, count), lookup(hardware.asynchronous(), shape, 1)
            predicted = 1e3 * median(steps.step_s(count, point.kv_tokens) for point in points)
            figures.add(f"decode step of {count} sequences, ms", 1e3 * median(one.seconds for one in points), predicted)
            predicted = 1e3 * (hardware.host_s + count * hardware.host_sequence_s)
            figures.add("  host's work of it, ms", 1e3 * median(host_seconds(engine, count)), predicted)
            engine.engine.sleep()
            replica = start_replica(setting, folder, Path(scratch))
            try:
                replica.answer(EngineReady)
                replica.ask(Standby(), Freed)
                device = SharedDevice(engine, replica, folder, image)
                # The first switch fills caches, and finds the engine in standby.
                device.round()
                for _ in range(ROUNDS):
                    rounds.append(device.round())
                # The engine serves again, or this raises.
                decode(engine, count)
            finally:
                if rounds:
                    show(rounds, memory.total - memory.workspace, figures)
                replica.end()


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


def host_seconds(engine: OfflineEngine, count: int) -> list[float]:
    """Seconds that the host works in each pass that forms a step ahead: when it begins, the step before has ended."""
    queue, found = engine.engine._client.engine_core.batch_queue, list[float]()
    for number in range(count):
        engine.submit(Generate(f"host {number}", pack_i32(range(PROMPT)), PROMPT))
    while engine.pending:
        if queue:
            queue[-1][0].result()
        found.append(seconds_of(engine.poll))
    # Steps before have prompts.
    return found[-PROMPT // 2 :]


def start_replica(setting: Setting, model: Path, folder: Path) -> MeasurementReplica:
    """The training process of a hybrid node: no optimizer, its weights from a file."""
    sections = {
        "model": {"path": str(model), "dtype": "bfloat16"},
        "slurm": {"device": setting.device},
        "train": {"tp": 1, "pp": 1, "threads": 1, "micro_tokens": STEP_TOKENS},
    }
    return MeasurementReplica(validate(sections), folder, elastic=True, random_weights=False)
