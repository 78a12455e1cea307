"""Compare policies: simulate each on the same work and the same engines."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, runtime_checkable

import msgspec

from libra_hpc.policies.scheduling.protocol import Policy
from libra_hpc.policies.scheduling.registry import make_policy, policy_class
from libra_hpc.protocol.trace import TrajectoryRecord

from .result import SimulationResult
from .settings import EngineSpec, SimulationSettings
from .simulate import simulate

FIELD = "--policy"


@runtime_checkable
class Foresees(Protocol):
    """The class of a policy that knows the future, which only a simulator has."""

    def foreseeing(
        self, work: Sequence[TrajectoryRecord], engines: Sequence[EngineSpec], settings: SimulationSettings
    ) -> Policy:
        """A policy for exactly this simulation."""


class Compared(msgspec.Struct, frozen=True):
    result: SimulationResult
    computed_s: float


def compare(
    work: Sequence[TrajectoryRecord],
    engines: Sequence[EngineSpec],
    policies: Sequence[str],
    settings: SimulationSettings,
    progress: Callable[[str, int], None] = lambda name, ended: None,
    before: Sequence[Sequence[TrajectoryRecord]] = (),
) -> dict[str, Compared]:
    """Simulate every policy, by its name in a run file; ``progress(name, trajectories that have ended)``.

    A policy that does not foresee is first trained on the batches ``before``, in order.  Raises `UserError` for what
    cannot be simulated.
    """
    done: dict[str, Compared] = {}
    for name in policies:
        found = policy_class(name, FIELD)
        if isinstance(found, Foresees):
            policy = found.foreseeing(work, engines, settings)
        else:
            policy = make_policy(name, FIELD)
            for earlier in before:
                simulate(earlier, engines, policy, settings)
        begin = time.perf_counter()
        result = simulate(work, engines, policy, settings, progress=partial(progress, name))
        done[name] = Compared(result, time.perf_counter() - begin)
    return done
