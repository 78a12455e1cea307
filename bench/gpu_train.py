"""Training time and memory on this GPU against the planner's cost model, and the cost of moving a node.

    python -m bench.gpu_train --device h200 --model qwen3-4b [--micro-tokens 4096,8192]

A Megatron-Core replica of one GPU runs GRPO steps over random trajectories.  Seconds and the allocator's peak are
compared with `TrainCost`.  Then standby, return from standby and the export of weights are timed.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from bench.gpu_model import random_model
from bench.harness import median, report
from libra_hpc.config.run import RunConfig
from libra_hpc.cost_models.lengths import TrajectoryLengths, sketch
from libra_hpc.cost_models.memory import TrainLayout
from libra_hpc.cost_models.training_time import BatchWork, TrainCost
from libra_hpc.hardware.architecture import read_shape
from libra_hpc.hardware.devices import device as device_named
from libra_hpc.hardware.models import model_shape
from libra_hpc.protocol.codec import pack_f32, pack_i32
from libra_hpc.protocol.trainer import Join, Sample, TrainStep
from libra_hpc.train import checkpoint
from libra_hpc.train.device import choose_device, local_store
from libra_hpc.train.elastic import ElasticReplicas
from libra_hpc.train.grpo_trainer import GrpoTrainer
from libra_hpc.train.settings import algorithm_settings, optimizer_settings
from libra_hpc.train.train_engine import TrainEngine, init_world

TRAJECTORIES = 48
LENGTHS = (256, 4096)
"""Shortest and longest trajectory, tokens, log-uniform; a third of each is generated."""
STEPS = 4
"""Steps per setting; the first one warms up allocator and kernels and is not counted."""


def trajectories(seed: int, vocab: int) -> list[Sample]:
    source = random.Random(seed)
    out = []
    for i in range(TRAJECTORIES):
        n = int(LENGTHS[0] * (LENGTHS[1] / LENGTHS[0]) ** source.random())
        mask = [0] * (n - n // 3) + [1] * (n // 3)
        tokens = [source.randrange(3, vocab) for _ in range(n)]
        out.append(
            Sample(
                uid=f"{seed}-{i}",
                tokens=pack_i32(tokens),
                loss_mask=bytes(mask),
                logprobs=pack_f32([-12.0 * m for m in mask]),
                advantage=source.choice((-1.0, 1.0)),
            )
        )
    return out


def timed(work: Callable[[], object]) -> float:
    """Seconds of ``work``, with the GPU synchronized before and after."""
    torch.cuda.synchronize()
    begin = time.monotonic()
    work()
    torch.cuda.synchronize()
    return time.monotonic() - begin


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="h200", help="name in the device table")
    parser.add_argument("--model", default="qwen3-4b", help="name in the model table")
    parser.add_argument("--micro-tokens", default="4096,8192")
    arguments = parser.parse_args()
    shape, device = model_shape(arguments.model), device_named(arguments.device)
    rows, raw = [], []
    with random_model(shape) as folder, tempfile.TemporaryDirectory(dir="/dev/shm") as scratch:
        cuda = choose_device("cuda", 0, 4)
        split = init_world(cuda, tp=1, pp=1, rank=0, store=local_store(), timeout_s=600.0)
        engine = TrainEngine(
            shape=read_shape(folder),
            device=cuda,
            dtype=torch.bfloat16,
            split=split,
            settings=optimizer_settings(RunConfig()),
        )
        checkpoint.start(engine, folder, "")
        state_bytes = torch.cuda.memory_allocated()
        replicas = ElasticReplicas(engine, 1, 600.0, 60.0)
        replicas.join(Join(0, 0, 1, ""))
        for micro_tokens in map(int, arguments.micro_tokens.split(",")):
            trainer = GrpoTrainer(engine, replicas, algorithm_settings(RunConfig()), micro_tokens)
            torch.cuda.reset_peak_memory_stats()
            got, expected = [], []
            for number in range(STEPS):
                samples = trajectories(number, shape.vocab)
                lengths = [len(s.loss_mask) for s in samples]
                loss_tokens = sum(sum(s.loss_mask) for s in samples)
                done = trainer.step(TrainStep(engine.state.step + 1, 0, (tuple(samples),), (loss_tokens,)))
                observed = [TrajectoryLengths(generated=n // 3, context=n, prompt=n - n // 3) for n in lengths]
                cost = TrainCost(
                    shape, device, 8, BatchWork(TRAJECTORIES, sketch(observed, TRAJECTORIES), minibatches=1)
                )
                layout = TrainLayout(tp=1, pp=1, cp=1, ep=1, dp=1, micro_tokens=micro_tokens)
                if number:
                    got.append((done.compute_s, done.optimizer_s))
                    expected.append(cost.time(layout))
            memory = cost.memory(layout)
            peak = torch.cuda.max_memory_allocated()
            seconds, predicted = median([c + o for c, o in got]), median([t.total for t in expected])
            mfu = median([t.mfu * t.total / (c + o) for t, (c, o) in zip(expected, got, strict=True)])
            for label, real, modelled in (
                ("step, s", seconds, predicted),
                ("  forward and backward, s", median([c for c, _ in got]), median([t.compute for t in expected])),
                ("  optimizer, s", median([o for _, o in got]), median([t.optimizer for t in expected])),
                ("MFU", mfu, median([t.mfu for t in expected])),
                (
                    "weights + gradients + optimizer, GB",
                    state_bytes / 1e9,
                    (memory.weights + memory.gradients + memory.optimizer) / 1e9,
                ),
                (
                    "activations + logits at the peak, GB",
                    (peak - state_bytes) / 1e9,
                    (memory.activations + memory.logits) / 1e9,
                ),
                ("peak, GB", peak / 1e9, (memory.total - memory.workspace) / 1e9),
            ):
                rows.append([f"micro {micro_tokens}", label, real, modelled, modelled / real])
            raw.append(
                {
                    "micro_tokens": micro_tokens,
                    "seconds": got,
                    "predicted": [t.total for t in expected],
                    "peak": peak,
                    "state": state_bytes,
                }
            )
        for _ in range(2):
            release, reclaim = timed(engine.release), timed(engine.reclaim)
        written = timed(lambda: checkpoint.export(engine, Path(scratch) / "weights.safetensors"))
        size = (Path(scratch) / "weights.safetensors").stat().st_size / 1e9
        for label, took in (
            ("to standby, s", release),
            ("back from standby, s", reclaim),
            (f"export of {size:.1f} GB to /dev/shm, s", written),
        ):
            rows.append(["move", label, took, "", ""])
    columns = ["", "what", "real", "planner", "planner / real"]
    notes = [
        f"{TRAJECTORIES} trajectories of {LENGTHS[0]} to {LENGTHS[1]} tokens, log-uniform; one optimizer step; medians"
        f" of {STEPS - 1}."
    ]
    report(
        "gpu_train",
        title=f"Training {arguments.model} on one {arguments.device} against the planner's model",
        columns=columns,
        rows=rows,
        notes=notes,
        raw=raw,
    )


if __name__ == "__main__":
    main()
