"""The simulated rollout engine process.

``python -m libra_hpc.simulated.engine_process --socket FD --config FILE``, with the file of the real engine.

* One thread sleeps until a message arrives or a step ends.
* An idle engine reports every `IDLE_INTERVAL_S`.
* It ends when the agent closes the socket.
"""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path

from libra_hpc.engine.settings import EngineConfig, engine_settings
from libra_hpc.engine.stats import IDLE_INTERVAL_S
from libra_hpc.models.devices import device
from libra_hpc.models.shapes import model_shape
from libra_hpc.models.step_times.lookup import lookup
from libra_hpc.process.entry import run
from libra_hpc.process.progress import Pulse
from libra_hpc.protocol.codec import EngineSocket
from libra_hpc.protocol.engine import (
    Abort,
    FromEngine,
    Generate,
    Sleep,
    ToEngine,
    UpdateWeights,
    Wake,
    from_engine,
    to_engine,
)
from libra_hpc.simulator.engine.simulated_engine import IDLE

from .clock import Clock, wait
from .dry_run import modelled
from .engine_core import SimulatedEngine


def serve(socket: EngineSocket[FromEngine], config: EngineConfig) -> None:
    """Run an engine.

    Raises `EOFError` once the agent has closed the socket, `UserError` for unknown hardware or an unknown model.
    """
    begin, pulse = time.monotonic(), Pulse(socket.send)
    simulated, rollout = config.run.simulated, config.run.rollout
    name, file, model = modelled(config.run, config.component)
    shape = model_shape(model).with_kv(rollout.kv_dtype, rollout.max_model_len, rollout.block_size)
    speedup = simulated.speedup
    devices, calibration = file or None, simulated.calibration or None
    machine = device(name, devices).asynchronous() if config.run.steps_ahead else name
    steps = lookup(machine, shape, config.tp, calibration, devices_file=devices)
    engine = SimulatedEngine(config, steps)
    print(f"step times: {steps.source}; {steps.kv_capacity} KV tokens; 1 s here stands for {speedup:g} s", flush=True)
    wait(socket.fileno(), simulated.start_s / speedup - (time.monotonic() - begin))
    clock = Clock(speedup)
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


def work(link: int, path: Path) -> int:
    with contextlib.suppress(EOFError, ConnectionError):
        serve(EngineSocket(link, to_engine, from_engine), engine_settings.decode(path.read_bytes()))
    return 0


if __name__ == "__main__":
    sys.exit(run("libra_hpc.simulated.engine_process", work))
