"""The simulated rollout engine process.

``python -m libra_hpc.simulated.engine_process --socket PATH --config FILE --pace JSON``: the `EngineConfig` file of the
real engine, and the modelled hardware.

* One thread sleeps until a message arrives or a step ends.
* An idle engine reports every `IDLE_INTERVAL_S`.
* It ends on `StopEngine`, or when the agent closes the socket.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import msgspec

from libra_hpc.engine.settings import EngineConfig
from libra_hpc.engine.stats import IDLE_INTERVAL_S
from libra_hpc.models.capacity import host_memory
from libra_hpc.models.devices import device
from libra_hpc.models.shapes import model_shape
from libra_hpc.models.step_times.lookup import lookup
from libra_hpc.process.progress import Pulse
from libra_hpc.protocol.codec import EngineSocket
from libra_hpc.protocol.engine import (
    Abort,
    FromEngine,
    Generate,
    Sleep,
    StopEngine,
    ToEngine,
    UpdateWeights,
    Wake,
    from_engine,
    to_engine,
)
from libra_hpc.simulator.engine.simulated_engine import IDLE

from .clock import Clock, wait
from .engine_core import SimulatedEngine
from .entry import run
from .settings import Pace


def serve(socket: EngineSocket[FromEngine], config: EngineConfig, pace: Pace) -> None:
    """Run an engine until `StopEngine`.

    Raises `EOFError` when the agent is gone, `UserError` for unknown hardware or an unknown model.
    """
    begin, pulse = time.monotonic(), Pulse(socket.send)
    shape = model_shape(pace.model).with_kv(config.kv_dtype)
    devices, calibration = pace.devices or None, pace.calibration or None
    machine = device(pace.device, devices).asynchronous() if config.async_steps else pace.device
    steps = lookup(machine, shape, config.tp, calibration, source=pace.source, devices_file=devices)
    host = None
    if config.kv_host_gb:
        gpu = device(pace.device, devices)
        host = host_memory(gpu, shape, config.tp, config.kv_host_gb)
    engine = SimulatedEngine(config, pace, steps, host)
    print(
        f"step times: {steps.source}; {steps.kv_capacity} KV tokens; 1 s here stands for {pace.speedup:g} s", flush=True
    )
    wait(socket.fileno(), pace.start_s / pace.speedup - (time.monotonic() - begin))
    clock = Clock(pace.speedup)
    pulse.end()
    socket.send(engine.ready(time.monotonic() - begin))
    sent_at = time.monotonic()
    while True:
        timeout = (
            IDLE_INTERVAL_S
            if engine.next_at == IDLE
            else min(IDLE_INTERVAL_S, max(0.0, clock.wall(engine.next_at - clock.now())))
        )
        message = socket.receive(timeout)
        now = clock.now()
        replies = engine.run_until(now)
        while message is not None:
            if isinstance(message, StopEngine):
                return
            replies += _handle(engine, message, now)
            message = socket.receive(0)
        if time.monotonic() - sent_at >= IDLE_INTERVAL_S:
            replies.append(engine.stats(now))
        if replies:
            sent_at = time.monotonic()
        socket.send_many(replies)


def _handle(engine: SimulatedEngine, message: ToEngine, now: float) -> list[FromEngine]:
    match message:
        case Generate():
            return engine.submit(message, now)
        case UpdateWeights():
            return engine.update(message, now)
        case Abort():
            engine.abort(message, now)
        case Sleep():
            return [*engine.sleep(now), engine.stats(now)]
        case Wake():
            engine.wake()
    return []


def main(arguments: list[str] | None = None) -> int:
    """Run it; exit codes as `entry.run`."""

    def work(socket: str, path: Path, pace: Pace) -> None:
        config = msgspec.json.decode(path.read_bytes(), type=EngineConfig)
        serve(EngineSocket(socket, to_engine, from_engine), config, pace)

    return run("engine", "A simulated rollout engine.", arguments, work)


if __name__ == "__main__":
    sys.exit(main())
