"""Step times of a made-up device, and lengths to try cost models with."""

from __future__ import annotations

import math
from statistics import NormalDist

from libra_hpc.models.devices import Device, device
from libra_hpc.models.shapes import ModelShape, model_shape
from libra_hpc.policies.search.batch_work import BatchWork

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


def agentic(trajectories: int = 512, eta: int = 1, generated: float = 4000.0, longest: int = 32768) -> BatchWork:
    """Many turns, heavy tail; with eta = 0 two minibatches, so that nothing is trained beside rollout."""
    quantiles = (NormalDist().inv_cdf((i + 0.5) / SAMPLE) for i in range(SAMPLE))
    lengths = (min(longest - BESIDE, max(1, round(generated * math.exp(z - 0.5)))) for z in quantiles)
    sample = tuple((BESIDE + length, length) for length in lengths)
    return BatchWork(trajectories, sample, eta, minibatches=1 if eta else 2)
