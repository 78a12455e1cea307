"""Compare policies: simulate one after another on the same work and the same engines."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import msgspec

from libra_hpc.policies.scheduling.registry import make_policy
from libra_hpc.protocol.trace import TrajectoryRecord

from .result import SimulationResult
from .settings import EngineSpec, SimulationSettings
from .simulate import simulate

FIELD = "--policy"


class Compared(msgspec.Struct, frozen=True):
    result: SimulationResult
    computed_s: float


def compare(
    work: Sequence[TrajectoryRecord],
    engines: Sequence[EngineSpec],
    policies: Sequence[str],
    settings: SimulationSettings,
    progress: Callable[[str], None],
) -> dict[str, Compared]:
    """Simulate every policy, by its name in a run file; ``progress(name)`` as it begins.

    Raises `UserError` for what cannot be simulated.
    """
    done: dict[str, Compared] = {}
    for name in policies:
        policy, begin = make_policy(name, FIELD), time.perf_counter()
        progress(name)
        result = simulate(work, engines, policy, settings)
        done[name] = Compared(result, time.perf_counter() - begin)
    return done
