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

from bench.gpu_check_steps import Figures, Setting, core_layout, core_memory
from bench.gpu_model import memory_field, roomy_folder, write_config
from libra_hpc.annexes.calibrate.measure_training import batches, random_samples
from libra_hpc.config.run import RunConfig
from libra_hpc.models.architecture import read_shape
from libra_hpc.models.memory import memory_limit
from libra_hpc.planning.measured_train_speed import step_time
from libra_hpc.protocol.trainer import Join, Sample, TrainStep
from libra_hpc.trainer.device import choose_device, local_store
from libra_hpc.trainer.elastic import ElasticReplicas
from libra_hpc.trainer.grpo_trainer import GrpoTrainer
from libra_hpc.trainer.saved import checkpoint
from libra_hpc.trainer.saved.weight_offers import WeightOffers
from libra_hpc.trainer.shards import loss_tokens_of
from libra_hpc.trainer.train_engine import TrainEngine, init_world
from libra_hpc.weights.pieces import WHOLE, offer_path, payload_path

TIMED = 3
"""Steps of each batch whose median is taken, after one that warms up allocator and kernels."""
MIXED = (0.4, 0.25, 0.15, 0.1, 0.06, 0.03)
"""Lengths of mixed trajectories as shares of a pack: like those of agents, few are long."""
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
        return memory_field("self", "VmRSS") - self._empty

    def peak(self) -> int:
        """Most since `forget_peak`."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        return memory_field("self", "VmHWM") - self._empty

    def forget_peak(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            # Sets the peak to the present size.
            Path("/proc/self/clear_refs").write_text("5")


def training(setting: Setting, figures: Figures) -> None:
    """Measure; the last batch of each size of packs has trajectories that fill one."""
    hardware = setting.hardware()
    shape = setting.shape(hardware)
    with roomy_folder(shape.weight_bytes) as scratch:
        folder = write_config(shape, scratch / shape.name)
        where = choose_device(setting.device, 0, setting.sizes.threads)
        split = init_world(where, tp=1, pp=1, rank=0, store=local_store(), timeout_s=600.0)
        memory = DeviceMemory(where)
        optimizer = msgspec.structs.replace(RunConfig().optimizer, lr=RANDOM_LR)
        engine = TrainEngine(read_shape(folder), where, torch.bfloat16, split, settings=optimizer)
        checkpoint.randomize(engine)
        replicas = ElasticReplicas(engine, 600.0, 60.0)
        replicas.join(Join(0, 0, 1, ""))
        state = memory.now()
        predicted = core_memory(shape, hardware, min(setting.sizes.packs))
        figures.add("parameters, 1e9", shape.params / GB)
        figures.add(
            "weights, gradients, optimizer, GB",
            state / GB,
            (predicted.weights + predicted.gradients + predicted.optimizer) / GB,
        )
        for pack_tokens in setting.sizes.packs:
            predicted = core_memory(shape, hardware, pack_tokens)
            limit = memory_limit(predicted, hardware)
            if limit is not None:
                figures.add(f"packs of {pack_tokens:,}: left out", limit.reason)
                continue
            trainer = GrpoTrainer(engine, replicas, RunConfig().changed(train={"micro_tokens": pack_tokens}))
            memory.forget_peak()
            for trajectories, context in batches(pack_tokens, 1, engine.shape.max_positions):
                samples = random_samples(trajectories, context, engine.shape.vocab)
                seconds = median(_steps(engine, trainer, samples))
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
        figures.add("update alone, s", seconds, step_time(shape, hardware, core_layout(1), 1, 2).parts["optimizer"])
        figures.add("update alone: memory beside the state, GB", (memory.peak() - state) / GB)
        offers = WeightOffers(engine, 0)
        seconds_of = timed(where, lambda: offers.write(scratch, 1, WHOLE))
        size = payload_path(offer_path(scratch, 1, "t0")).stat().st_size
        figures.add(f"whole offer of {size / GB:.2f} GB, s", seconds_of)


def _steps(engine: TrainEngine, trainer: GrpoTrainer, samples: tuple[Sample, ...]) -> list[float]:
    """Seconds of `TIMED` steps after one that is not counted."""
    seconds: list[float] = []
    for _ in range(1 + TIMED):
        order = TrainStep(engine.state.step + 1, 0, (samples,), (sum(map(loss_tokens_of, samples)),))
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
