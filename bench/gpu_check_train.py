"""Training on one device against the planner's cost models: seconds of a step, MFU, memory, and the export of weights.

A Megatron-Core core of one rank with random weights runs GRPO steps over random trajectories of three lengths.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import msgspec
import torch

from bench.gpu_check_setting import Figures, Setting, core_layout, core_memory
from bench.gpu_model import roomy_folder, write_config
from libra_hpc.config.run import RunConfig
from libra_hpc.cost_models.memory import memory_limit
from libra_hpc.hardware.architecture import read_shape
from libra_hpc.planning.train_speed import step_time
from libra_hpc.protocol.trainer import Join, TrainStep
from libra_hpc.train import checkpoint
from libra_hpc.train.device import choose_device, local_store
from libra_hpc.train.elastic import ElasticReplicas
from libra_hpc.train.grpo_trainer import GrpoTrainer
from libra_hpc.train.measure import batches, random_samples
from libra_hpc.train.settings import algorithm_settings, optimizer_settings
from libra_hpc.train.train_engine import TrainEngine, init_world

TIMED = 3
"""Steps of each batch whose median is taken, after one that warms up allocator and kernels."""
RANDOM_LR = 1e-9
"""No update moves the random weights far from where they are finite."""
GB = 1e9


class DeviceMemory:
    """Bytes that this process holds on its device: torch's allocator, or without a GPU the process's own memory."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._empty = device, 0
        self._empty = self.now()

    def now(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.memory_allocated(self._device)
        return _own_kib("VmRSS") * 1024 - self._empty

    def peak(self) -> int:
        """Most since `forget_peak`."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        return _own_kib("VmHWM") * 1024 - self._empty

    def forget_peak(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            # Sets the peak to the present size.
            Path("/proc/self/clear_refs").write_text("5")


def _own_kib(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1])
    raise OSError(f"this kernel does not tell a process's {field}")


def training(setting: Setting, figures: Figures) -> None:
    """Measure; the last batch of each pack size has trajectories that fill a pack."""
    hardware = setting.hardware()
    shape = setting.shape(hardware)
    with roomy_folder(shape.weight_bytes) as scratch:
        folder = write_config(shape, scratch / shape.name)
        where = choose_device(setting.device, 0, setting.threads)
        split = init_world(where, tp=1, pp=1, rank=0, store=local_store(), timeout_s=600.0)
        memory = DeviceMemory(where)
        optimizer = msgspec.structs.replace(optimizer_settings(RunConfig()), lr=RANDOM_LR)
        engine = TrainEngine(read_shape(folder), where, torch.bfloat16, split, settings=optimizer)
        checkpoint.randomize(engine)
        replicas = ElasticReplicas(engine, 1, 600.0, 60.0)
        replicas.join(Join(0, 0, 1, ""))
        state = memory.now()
        predicted = core_memory(shape, hardware, min(setting.packs))
        figures.add("parameters, 1e9", shape.params / GB)
        figures.add(
            "weights, gradients, optimizer, GB",
            state / GB,
            (predicted.weights + predicted.gradients + predicted.optimizer) / GB,
        )
        for pack_tokens in setting.packs:
            predicted = core_memory(shape, hardware, pack_tokens)
            limit = memory_limit(predicted, hardware)
            if limit is not None:
                figures.add(f"packs of {pack_tokens:,}: left out", limit.reason)
                continue
            algorithm = msgspec.structs.replace(algorithm_settings(RunConfig()), kl_coef=0.0)
            trainer = GrpoTrainer(engine, replicas, algorithm, pack_tokens)
            memory.forget_peak()
            for trajectories, context in batches(pack_tokens, 1, engine.shape.max_positions):
                seconds = median(_steps(engine, trainer, trajectories, context))
                time_of = step_time(shape, hardware, core_layout(pack_tokens), trajectories, context)
                figures.add(f"step of {trajectories} x {context:,} tokens, s", seconds, time_of.total)
            figures.add(f"{trajectories} x {context:,}: tokens/s", trajectories * context / seconds)
            figures.add(f"{trajectories} x {context:,}: MFU", time_of.mfu * time_of.total / seconds, time_of.mfu)
            figures.add(
                f"packs of {pack_tokens:,}: activations and logits, GB",
                (memory.peak() - state) / GB,
                (predicted.activations + predicted.logits) / GB,
            )
            figures.add(
                f"packs of {pack_tokens:,}: peak, GB", memory.peak() / GB, (predicted.total - predicted.workspace) / GB
            )
        memory.forget_peak()
        seconds = timed(where, lambda: engine.update(1.0, 1.0))
        figures.add("update alone, s", seconds, step_time(shape, hardware, core_layout(1), 1, 2).optimizer)
        figures.add("update alone: memory beside the state, GB", (memory.peak() - state) / GB)
        weights = scratch / "export.safetensors"
        seconds_of = timed(where, lambda: checkpoint.export(engine, weights))
        figures.add(f"export of {weights.stat().st_size / GB:.2f} GB, s", seconds_of)


def _steps(engine: TrainEngine, trainer: GrpoTrainer, trajectories: int, context: int) -> list[float]:
    """Seconds of `TIMED` steps after one that is not counted."""
    samples, seconds = random_samples(trajectories, context, engine.shape.vocab), list[float]()
    for _ in range(1 + TIMED):
        order = TrainStep(engine.state.step + 1, 0, (samples,), (trajectories * (context - 1),))
        seconds.append(timed(engine.device, lambda order=order: trainer.step(order)))  # type: ignore[misc]
    return seconds[1:]


def timed(device: torch.device, work: Callable[[], object]) -> float:
    """Seconds of ``work``, with the device synchronized before and after."""
    _synchronize(device)
    begin = time.monotonic()
    work()
    _synchronize(device)
    return time.monotonic() - begin


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
