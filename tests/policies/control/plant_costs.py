"""Step times of a made-up device, and lengths to try cost models with."""

from __future__ import annotations

from libra_hpc.models.devices import Device, device
from libra_hpc.models.shapes import ModelShape, model_shape
from libra_hpc.policies.costs.lengths import BatchWork, TrajectoryLengths, lognormal, sketch
from libra_hpc.policies.costs.rollout_time import ReplicaCost, RolloutOptions
from libra_hpc.policies.search.rollout_layout import ReplicaClass

A800 = device("a800")
QWEN = model_shape("qwen3-14b")


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


def one_turn(*generated: int, prompt: int = 10) -> list[TrajectoryLengths]:
    """Trajectories of a single turn."""
    return [TrajectoryLengths(n, prompt + n, prompt) for n in generated]


def batch_of(*generated: int, eta: int = 0, prompt: int = 10) -> BatchWork:
    """A global batch of exactly these trajectories, each in its own bin (up to sixteen)."""
    return BatchWork(len(generated), sketch(one_turn(*generated, prompt=prompt), len(generated)), eta)


def agentic(trajectories: int = 512, eta: int = 1, generated: float = 4000.0, longest: int = 32768) -> BatchWork:
    """Many turns, heavy tail; with eta = 0 two minibatches, so that nothing is trained beside rollout."""
    made = lognormal(generated=generated, sigma=1.0, prompt=1000, turns=10, new_tokens=200, tool_s=1.0, longest=longest)
    return BatchWork(trajectories, sketch(made, trajectories), eta, minibatches=1 if eta else 2)


def costs(batch: BatchWork, *steps: FakeSteps, options: RolloutOptions = RolloutOptions()) -> list[ReplicaClass]:  # noqa: B008
    """One class of one pool per step table."""
    return [ReplicaClass(0, ReplicaCost(s, batch, options)) for s in steps]
