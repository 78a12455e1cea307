"""Step times of a made-up device, and lengths to try cost models with."""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Any

from msgspec.structs import replace

from libra_hpc.config.load import validate
from libra_hpc.models.devices import Device, device
from libra_hpc.models.shapes import ModelShape, model_shape
from libra_hpc.models.train_seconds import TrainWork, work_of
from libra_hpc.planning.request import DevicePool, PlanRequest
from libra_hpc.planning.train_layout import TrainSpace
from libra_hpc.simulator.settings import SimulationSettings
from libra_hpc.traces.run_work import run_work

A800 = device("a800")
QWEN = model_shape("qwen3-14b")
SAMPLE, BESIDE = 512, 2800
"""Trajectories of `agentic`, and their tokens that are not generated."""


class FakeSteps:
    """Step times of a made-up device.

    A step takes ``(fixed + decodes * each + kv_tokens * kv + prefill * new) / tp ** scaling``.
    """

    source = "made up"

    def __init__(
        self,
        tp: int,
        capacity: int = 10**9,
        fixed: float = 1.0,
        each: float = 0.0,
        kv: float = 0.0,
        new: float = 0.0,
        scaling: float = 0.8,
    ) -> None:
        self.tp, self.kv_capacity = tp, capacity
        self.terms = (fixed, each, kv, new)
        self.scale = tp**scaling

    def step_s(self, decodes: int, kv_tokens: int, prefill: int = 0, context: int = 0) -> float:
        fixed, each, kv, new = self.terms
        return (fixed + decodes * each + kv_tokens * kv + prefill * new) / self.scale


def fake(device: Device, shape: ModelShape, tp: int) -> FakeSteps:
    """`libra_hpc.models.step_times.lookup.StepLookup` of the made-up device."""
    return FakeSteps(tp, capacity=60_000 * tp, fixed=0.02, each=2e-4, kv=1e-7, new=1e-4)


def agentic(trajectories: int = 512, generated: float = 4000.0, longest: int = 32768) -> TrainWork:
    """Many turns, heavy tail."""
    quantiles = (NormalDist().inv_cdf((i + 0.5) / SAMPLE) for i in range(SAMPLE))
    lengths = (min(longest - BESIDE, max(1, round(generated * math.exp(z - 0.5)))) for z in quantiles)
    return work_of(((BESIDE + length, length) for length in lengths), trajectories)


def question(shape: ModelShape, *pools: DevicePool, trajectories: int = 512, **more: Any) -> PlanRequest:
    """For batches of `agentic` trajectories, each of a prompt of its own."""
    return PlanRequest(
        shape=shape,
        pools=pools,
        batch=agentic(trajectories),
        settings=SimulationSettings(batch_groups=trajectories, eta=1),
        space=TrainSpace(),
        work=replace(run_work(validate({"rollout": {"max_model_len": 32768}})), group=1),
        **more,
    )
