"""Compare policies: simulate each on the same work and the same engines."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import msgspec

from libra_hpc.protocol.trace import TrajectoryRecord

from .foresight import foresight_of
from .policies import ORACLE, make_simulated_policy
from .result import SimResult
from .settings import EngineSpec, SimSettings
from .simulate import simulate


class Compared(msgspec.Struct, frozen=True):
    result: SimResult
    computed_s: float


def compare(
    work: Sequence[TrajectoryRecord],
    engines: Sequence[EngineSpec],
    policies: Sequence[str],
    settings: SimSettings,
    started: Callable[[str], None] = lambda name: None,
    before: Sequence[Sequence[TrajectoryRecord]] = (),
) -> dict[str, Compared]:
    """Simulate every policy; calls ``started(name)`` before each.

    Every policy but the oracle is first trained on the batches ``before``, in order.  Raises `UserError` for what
    cannot be simulated.
    """
    done: dict[str, Compared] = {}
    foresight = foresight_of(work, engines, settings)
    for name in policies:
        started(name)
        policy = make_simulated_policy(name, foresight)
        for earlier in before if name != ORACLE else ():
            simulate(earlier, engines, policy, settings)
        begin = time.perf_counter()
        result = simulate(work, engines, policy, settings)
        done[name] = Compared(result, time.perf_counter() - begin)
    return done
