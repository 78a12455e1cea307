"""Measured training speed as a factor of the cost model: from a file of ``calibrate train``, or from an earlier run.

- A run -> the median over its steps of measured seconds over the model's for as many tokens, without the first step.
- The factor multiplies compute, communication and optimizer alike: one number cannot divide them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import msgspec

from libra_hpc.config.load import validate
from libra_hpc.config.node_groups import elastic_world
from libra_hpc.config.run import RunConfig
from libra_hpc.errors import invalid
from libra_hpc.facts.rundir import RunDir, read_lines
from libra_hpc.models.devices import Device
from libra_hpc.models.memory import TrainLayout, core_layout
from libra_hpc.models.shapes import ModelShape
from libra_hpc.models.step_times.train_speed import FIELD, TrainSample, TrainSpeed, load_speed
from libra_hpc.models.train_seconds import HybridWorlds, TrainCost, TrainTime, work_of
from libra_hpc.models.update_time import UpdateTime, measured
from libra_hpc.traces.run_work import of_trace

from .request import PlanRequest, as_planned, request

WARM_UP_STEPS = 1
"""Steps of a run that are left out: the first one compiles kernels and fills caches."""


Measured = tuple[float, str, str, UpdateTime | None]
"""Measured over predicted seconds, device, source in words, and new weights where a run has measured them."""


def step_time(shape: ModelShape, device: Device, layout: TrainLayout, trajectories: int, context: int) -> TrainTime:
    """Prediction for ``trajectories`` of ``context`` tokens each, on one node."""
    work = work_of([(context, context - 1)] * trajectories)
    return TrainCost(shape, device, layout.devices, work).time(layout)


def speed_of(
    shape: ModelShape, device: Device, layout: TrainLayout, measured: Sequence[tuple[int, int, Sequence[float]]]
) -> TrainSpeed:
    """The file's content for measured steps: (trajectories, context, seconds of each step)."""
    samples, speeds = [], []
    for trajectories, context, seconds in measured:
        time, taken = step_time(shape, device, layout, trajectories, context), median(seconds)
        samples.append(
            TrainSample(
                trajectories=trajectories, context=context, steps=len(seconds), seconds=taken, predicted=time.total
            )
        )
        speeds.append((trajectories * context / taken, time.mfu * time.total / taken))
    tokens_s, mfu = max(speeds)
    return TrainSpeed(
        device=device.name,
        model=shape.name,
        layout=str(layout),
        tokens_s=tokens_s,
        mfu=mfu,
        factor=median(sample.seconds / sample.predicted for sample in samples),
        samples=tuple(samples),
    )


def with_train_speed(asked: PlanRequest, path: str) -> PlanRequest:
    """``asked`` with the training speed in a file or of a run; as it is without one.

    Raises `UserError` for one that is unreadable or of another device.
    """
    if not path:
        return asked
    factor, device, source, updated = _of_run(RunDir(path)) if os.path.isdir(path) else _of_file(Path(path))
    names = [pool.device.name for pool in asked.pools]
    if device not in names:
        raise invalid("planner.train_speed", path, f"measured on {device}", f"one of {', '.join(names)}")
    words = f"{factor:.2f} x the model's seconds ({source})"
    return msgspec.structs.replace(asked, train_factor=factor, train_speed=words, updated=updated)


def _of_file(path: Path) -> Measured:
    speed = load_speed(path)
    return speed.factor, speed.device, f"{path.name}: {speed.model} as {speed.layout}", None


def _of_run(run: RunDir) -> Measured:
    resolved = run.resolved()
    if not resolved:
        raise invalid(FIELD, str(run.path), "not a run directory", "a run, or a file of libra-hpc calibrate train")
    config: RunConfig = validate(resolved)
    if config.run.engine != "real":
        raise invalid(FIELD, str(run.path), "a dry run measures no training", "a run with run.engine = 'real'")
    asked = request(as_planned(of_trace(config, str(run.trajectories))))
    factors, core, own = [], core_layout(config), elastic_world(config)
    cost = TrainCost(asked.shape, asked.pools[0].device, asked.pools[0].node_devices, asked.batch)
    lines = list(read_lines(run.metrics))[WARM_UP_STEPS:]
    for line in lines:
        if line.get("trained_tokens", 0) > 0 and line.get("train_s", 0) > 0 and line.get("replicas", 0) > 0:
            others = max(0, line["replicas"] - core.dp) // own.dp
            beside = HybridWorlds(others, own.dp)
            share = line["trained_tokens"] / asked.batch.tokens
            factors.append(line["train_s"] / (cost.time(core, beside).total * share))
    if not factors:
        raise invalid(FIELD, str(run.path), "no step there after the first", "a run of two steps or more")
    words = f"{len(factors)} steps of {run.name}"
    least_tp = min(config.rollout.on_node(place)[0] for place in config.rollout_places)
    updated = measured(lines, least_tp, core.devices)
    return median(factors), asked.pools[0].device.name, words, updated
