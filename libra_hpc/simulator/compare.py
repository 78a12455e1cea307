"""Compare policies: simulate each on the same work and the same engines."""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import cast

import msgspec

from libra_hpc.errors import OperationError, UserError
from libra_hpc.policies.scheduling.registry import make_policy
from libra_hpc.protocol.trace import TrajectoryRecord

from .result import SimulationResult
from .settings import EngineSpec, SimulationSettings
from .simulate import simulate

FIELD = "--policy"


class Compared(msgspec.Struct, frozen=True):
    result: SimulationResult
    computed_s: float


def compare_at_once(
    work: Sequence[TrajectoryRecord],
    engines: Sequence[EngineSpec],
    policies: Sequence[str],
    settings: SimulationSettings,
    progress: Callable[[str, int], None],
) -> dict[str, Compared]:
    """Simulate each policy, by its name in a run file, in a process; ``progress(name, trajectories that have ended)``.

    Raises `UserError` for what cannot be simulated, `OperationError` where a process ends without a result.
    """
    links: dict[Connection, str] = {}
    # Forks, because sixteen thousand trajectories would take seconds to send.
    context = multiprocessing.get_context("fork")
    for name in policies:
        here, there = context.Pipe(duplex=False)
        context.Process(target=_simulated, args=(there, work, engines, name, settings), daemon=True).start()
        there.close()
        links[here] = name
    done: dict[str, Compared] = {}
    while len(done) < len(links):
        for link in wait([link for link, name in links.items() if name not in done]):
            name = links[cast(Connection, link)]
            try:
                message = cast(Connection, link).recv()
            except EOFError:
                raise OperationError(f"The simulation of {name} ended without a result.") from None
            if isinstance(message, Exception):
                raise message
            if isinstance(message, int):
                progress(name, message)
            else:
                done[name] = message
    return {name: done[name] for name in policies}


def _simulated(
    link: Connection,
    work: Sequence[TrajectoryRecord],
    engines: Sequence[EngineSpec],
    name: str,
    settings: SimulationSettings,
) -> None:
    # Ctrl-C is for the process that waits; this one ends with it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with suppress(BrokenPipeError):
        try:
            policy, begin = make_policy(name, FIELD), time.perf_counter()
            result = simulate(work, engines, policy, settings, progress=link.send)
            link.send(Compared(result, time.perf_counter() - begin))
        except (UserError, OperationError) as error:
            link.send(error)
