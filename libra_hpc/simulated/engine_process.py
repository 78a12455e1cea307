"""The simulated vLLM replica: messages of `libra_hpc.protocol.engine` around the simulator's `Engine`.

``python -m libra_hpc.simulated.engine_process --socket FD --config FILE``, with the file of the real engine.

* One thread sleeps until a message arrives or a step ends.  An idle engine reports every `IDLE_INTERVAL_S`.
* The core has simulated seconds; messages have wall seconds, as everything in the live runtime.
* `run_until` simulates each step at its own time, so a process that wakes late answers late but computes the same.
* As in the real engine, what is no image is refused, and an update pauses the engine and empties the KV cache, or with
  ``kv_after_update = "keep"`` later groups do not find it (salt).
* An engine in standby, or woken without new weights, refuses turns.  Log-probabilities are 0.
"""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path

import msgspec

from libra_hpc.engine.settings import EngineConfig, engine_settings
from libra_hpc.engine.stats import IDLE_INTERVAL_S, INTERVAL_S
from libra_hpc.engine.warm_up import lengths
from libra_hpc.errors import error_text
from libra_hpc.models.devices import device
from libra_hpc.models.shapes import model_shape
from libra_hpc.models.step_times.lookup import lookup
from libra_hpc.models.step_times.steps import StepTimes
from libra_hpc.process.entry import run
from libra_hpc.process.progress import Pulse
from libra_hpc.protocol.codec import EngineSocket
from libra_hpc.protocol.engine import (
    Abort,
    EngineFailed,
    FromEngine,
    Generate,
    Generated,
    Sleep,
    ToEngine,
    UpdateWeights,
    Wake,
    WeightsApplied,
    WeightsRefused,
    from_engine,
    refusal,
    to_engine,
)
from libra_hpc.protocol.engine_state import EngineCapacity, EngineReady, EngineStats
from libra_hpc.simulator.engine.simulated_engine import IDLE, Engine
from libra_hpc.simulator.engine.simulated_request import SimulatedRequest
from libra_hpc.simulator.settings import run_settings
from libra_hpc.weights.image import NoVersion, reading
from libra_hpc.weights.weightfile import WeightFileError

from . import state, tokens
from .clock import Clock, wait
from .dry_run import modelled

FLOAT_BYTES = 4


class _Turn:
    def __init__(self, rid: str, request: SimulatedRequest, full: bool, now: float) -> None:
        self.rid, self.request, self.full = rid, request, full
        self.arrived, self.admitted = now, -1.0
        self.spans: list[tuple[int, int]] = []
        self.spanned = 0

    def close_span(self, version: int) -> None:
        """Mark the tokens since the last call as sampled under ``version``."""
        count = self.request.generated - self.spanned
        if count:
            self.spans.append((version, count))
            self.spanned += count


class SimulatedEngine:
    """One replica."""

    def __init__(self, config: EngineConfig, steps: StepTimes) -> None:
        rollout, speedup = config.run.rollout, config.run.simulated.speedup
        self._config, self._rollout, self._simulated = config, rollout, config.run.simulated
        limits = msgspec.structs.replace(run_settings(config.run), report_s=INTERVAL_S * speedup)
        self._engine = Engine(
            name="simulated", tp=config.tp, steps=steps, settings=limits, number=0, version=config.version, now=0.0
        )
        self._steps, self._kv_tokens = steps, steps.kv_capacity
        self._turns: dict[str, _Turn] = {}
        self._rids: dict[SimulatedRequest, str] = {}
        self._waiting: list[_Turn] = []
        self._updates: list[UpdateWeights] = []
        self._extra_s = 0.0
        self._asleep, self._refuses = False, ""

    @property
    def next_at(self) -> float:
        """Time of the next event for `run_until`; `IDLE` (infinity) without one."""
        return self._engine.next_at

    def ready(self, start_s: float) -> EngineReady:
        """The first message to the agent; ``start_s`` in wall seconds."""
        capacity = EngineCapacity(
            tp=self._config.tp,
            max_model_len=self._rollout.max_model_len,
            kv_tokens=self._kv_tokens,
            warm_up=self._warm_up(),
        )
        return EngineReady(version=self._config.version, seconds=start_s, capacity=capacity)

    def _warm_up(self) -> tuple[EngineStats, ...]:
        """The warm-up profile of `libra_hpc.engine.warm_up`, from the modelled step times."""
        decodes, prompt = lengths(self._rollout.max_model_len)
        decoded, read = decodes * self._steps.step_s(1, 1), self._steps.step_s(0, 0, prompt)
        start = EngineStats(self._config.version)
        between = msgspec.structs.replace(start, generated_tokens=decodes, steps=decodes, busy_s=decoded)
        end = msgspec.structs.replace(between, prefill_tokens=prompt, steps=decodes + 1, busy_s=decoded + read)
        return start, self._wall(between), self._wall(end)

    def submit(self, message: Generate, now: float) -> list[FromEngine]:
        if message.rid in self._turns:
            return [EngineFailed(f"request {message.rid!r} is already in flight.", fatal=False)]
        room = self._rollout.max_model_len - len(message.prompt) // 4
        try:
            context = tokens.read(message.prompt)
        except tokens.Unreadable as error:
            return [refusal(message.rid, str(error))]
        if self._refuses or room < 1 or message.max_tokens < 1:
            return [
                refusal(
                    message.rid,
                    self._refuses
                    or f"prompt: {context.tokens} tokens, max_tokens = {message.max_tokens}: no room for one more.",
                )
            ]
        left = min(context.left, room, message.max_tokens)
        prompt = f"{self._salt(message)}{context.prompt}"
        request = SimulatedRequest(
            trajectory=f"{prompt}/{context.sample}",
            prompt=prompt,
            prompt_blocks=context.prompt_tokens // self._rollout.block_size,
            tokens=context.tokens,
            left=left,
            priority=message.priority,
        )
        turn = _Turn(message.rid, request, left == context.left, now)
        self._turns[message.rid] = turn
        self._rids[request] = message.rid
        self._waiting.append(turn)
        self._engine.submit(request, now)
        return []

    def _salt(self, message: Generate) -> str:
        """See `libra_hpc.engine.core`."""
        version = self._engine.version
        admitted = version if message.admitted < 0 else min(message.admitted, version)
        return f"{admitted}: " if self._rollout.kv_after_update == "keep" else ""

    def abort(self, message: Abort, now: float) -> None:
        turn = self._turns.get(message.rid)
        if turn is not None and not turn.request.aborted:
            self._engine.abort(turn.request, now)

    def update(self, message: UpdateWeights, now: float) -> list[FromEngine]:
        if self._asleep:
            return [WeightsRefused(message.version, f"{message.path}: the engine is asleep; wake it first.")]
        try:
            with reading(Path(message.path)) as version:
                message = UpdateWeights(message.path, version)
                if not state.holds(Path(message.path), version):
                    raise WeightFileError(f"{message.path}: its weights are not those of version {version}.")
        except (OSError, WeightFileError) as error:
            return [WeightsRefused(message.version, error_text(error), isinstance(error, NoVersion))]
        if message.version == self._engine.version and not self._updates:
            return [WeightsApplied(message.version, 0.0)]
        self._updates.append(message)
        self._engine.swap(message.version, self._simulated.sync_s + self._extra_s, now)
        self._extra_s = 0.0
        return []

    def sleep(self, now: float) -> list[FromEngine]:
        for turn in self._turns.values():
            if not turn.request.aborted:
                self._engine.abort(turn.request, now)
        out: list[FromEngine] = []
        while self._engine.next_at != IDLE:
            out += self._advance()
        self._asleep, self._refuses = True, "the engine is asleep."
        return out

    def wake(self) -> None:
        """Leave standby: turns are refused until the next weight update, which takes ``wake_s`` longer."""
        self._asleep, self._refuses = False, "the engine has woken and has no current weights yet."
        self._extra_s = self._simulated.wake_s
        self._engine.version = -1

    def stats(self, now: float) -> EngineStats:
        return self._wall(self._engine.snapshot())

    def run_until(self, now: float) -> list[FromEngine]:
        out: list[FromEngine] = []
        while self._engine.next_at <= now:
            out += self._advance()
        return out

    def _advance(self) -> list[FromEngine]:
        engine, at = self._engine, self._engine.next_at
        version = engine.version
        done = engine.advance(at)
        out: list[FromEngine] = []
        if engine.version != version:
            for turn in self._turns.values():
                turn.close_span(version)
            out += self._applied()
        for request in done:
            out.append(self._finish(request, version, at))
        if self._waiting:
            for turn in self._waiting:
                if turn.request.blocks:
                    turn.admitted = at
            self._waiting = [turn for turn in self._waiting if turn.admitted < 0.0 and turn.rid in self._turns]
        stats = engine.report(at)
        if stats is not None:
            out.append(self._wall(stats))
        return out

    def _applied(self) -> list[FromEngine]:
        # An update replaced by a newer one counts as applied with that one.
        version = self._engine.version
        ended = [update for update in self._updates if update.version <= version]
        self._updates = [update for update in self._updates if update.version > version]
        self._refuses = ""
        return [WeightsApplied(version, self._simulated.sync_s / self._simulated.speedup)] if ended else []

    def _finish(self, request: SimulatedRequest, version: int, at: float) -> Generated:
        turn = self._turns.pop(self._rids.pop(request))
        turn.close_span(version)
        complete = not request.left and turn.full
        finish = "abort" if request.left else "stop" if complete else "length"
        admitted = turn.admitted if turn.admitted >= 0.0 else at
        return Generated(
            rid=turn.rid,
            tokens=tokens.generated(request.generated, complete),
            logprobs=bytes(FLOAT_BYTES * request.generated),
            finish=finish,
            versions=tuple(turn.spans),
            cached_tokens=request.cached,
            queue_s=(admitted - turn.arrived) / self._simulated.speedup,
            run_s=(at - admitted) / self._simulated.speedup,
        )

    def _wall(self, stats: EngineStats) -> EngineStats:
        speedup = self._simulated.speedup
        return msgspec.structs.replace(
            stats, busy_s=stats.busy_s / speedup, update_s=stats.update_s / speedup, asleep=self._asleep
        )


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
