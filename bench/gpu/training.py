"""Training on one device against the planner's cost models: seconds of a step, MFU, and memory.

A Megatron-Core core of one rank with random weights runs GRPO steps over random trajectories of three lengths.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch
from msgspec.structs import replace

from bench.gpu.model import write_config
from bench.gpu.setting import Figures, Setting, core_layout, core_memory
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
from libra_hpc.trainer.shards import loss_tokens_of
from libra_hpc.trainer.train_engine import TrainEngine, init_world

TIMED = 3
"""Steps of each batch whose median is taken, after one that warms up allocator and kernels."""
RANDOM_LR = 1e-9
"""No update moves the random weights far from where they are finite."""
GB = 1e9


def training(setting: Setting, figures: Figures) -> None:
    """Measure; the last batch of each size of packs has trajectories that fill one."""
    hardware = setting.hardware()
    shape, on_gpu = setting.shape(hardware), setting.device == "cuda"
    where = choose_device(setting.device, 0, setting.sizes.threads)
    world = init_world(where, tp=1, pp=1, rank=0, store=local_store(), timeout_s=600.0)
    optimizer = replace(RunConfig().optimizer, lr=RANDOM_LR)
    with TemporaryDirectory(prefix="libra-gpu-") as name:
        architecture = read_shape(write_config(shape, Path(name, shape.name)))
    engine = TrainEngine(architecture, where, torch.bfloat16, world, settings=optimizer)
    checkpoint.randomize(engine)
    replicas = ElasticReplicas(engine, 600.0, 60.0)
    replicas.join(Join(0, 0, 1, ""))
    figures.add("parameters, 1e9", shape.params / GB)
    if on_gpu:
        expected = core_memory(shape, hardware, min(setting.sizes.packs))
        state = (expected.weights + expected.gradients + expected.optimizer) / GB
        figures.add("weights, gradients, optimizer, GB", torch.cuda.memory_allocated(where) / GB, state)
    for pack_tokens in setting.sizes.packs:
        expected = core_memory(shape, hardware, pack_tokens)
        if limit := memory_limit(expected, hardware):
            figures.add(f"packs of {pack_tokens:,}: left out", limit.reason)
            continue
        trainer = GrpoTrainer(engine, replicas, RunConfig().changed(train={"micro_tokens": pack_tokens}))
        if on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(where)
        for trajectories, context in batches(pack_tokens, 1, engine.shape.max_positions):
            samples = random_samples(trajectories, context, engine.shape.vocab)
            seconds = median([step_s(engine, trainer, samples) for _ in range(1 + TIMED)][1:])
            planned = step_time(shape, hardware, core_layout(pack_tokens), trajectories, context)
            figures.add(f"step of {trajectories} x {context:,} tokens, s", seconds, planned.total)
        figures.add(f"{trajectories} x {context:,}: MFU", planned.mfu * planned.total / seconds, planned.mfu)
        if on_gpu:
            peak, most = torch.cuda.max_memory_allocated(where), expected.total - expected.workspace
            figures.add(f"packs of {pack_tokens:,}: peak, GB", peak / GB, most / GB)


def step_s(engine: TrainEngine, trainer: GrpoTrainer, samples: tuple[Sample, ...]) -> float:
    """Seconds of a step."""
    order = TrainStep(engine.state.step + 1, 0, (samples,), (sum(map(loss_tokens_of, samples)),))
    return timed(engine.device, lambda: trainer.step(order))


def timed(device: torch.device, work: Callable[[], object]) -> float:
    """Seconds of ``work`` until the device has done it; it must have nothing else to do."""
    begin = time.monotonic()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.monotonic() - begin
