"""The loop of the engine process: messages in, steps, answers out, on one thread.

- Between two steps -> drain the socket without blocking, so that a request joins the next batch.
- Idle -> block in ``select``, and report once a second.
- The users of the device leave no room (`libra_hpc.gate.gated_steps`) -> no step, all else as between two steps.
- Weight update -> stage it while steps go on; apply it between two steps, with none in flight, in the order received.
- Closed socket or SIGTERM -> exit 0.
- Failed step or half-applied update -> answer every request with ``error``, send a fatal `EngineFailed`, exit 1.
- Agent lost while a step or the start-up hangs -> a watcher thread ends the process.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from types import FrameType
from typing import Any

from libra_hpc.gate.gated_steps import GatedStart
from libra_hpc.process.progress import Pulse
from libra_hpc.protocol.codec import EngineSocket
from libra_hpc.protocol.engine import (
    Abort,
    EngineFailed,
    FromEngine,
    Generate,
    Sleep,
    ToEngine,
    UpdateWeights,
    Wake,
    WeightsRefused,
    from_engine,
    to_engine,
)
from libra_hpc.protocol.engine_state import ENGINE_STEP, IDLE, PAUSED, WAKE, WEIGHTS
from libra_hpc.weights.image import NoVersion
from libra_hpc.weights.weightfile import WeightFileError

from .core import DuplicateRequest, RolloutEngine
from .settings import EngineConfig
from .stats import IDLE_INTERVAL_S, Pacer
from .update.staged_update import POLL_S

HANGUP_GRACE_S = 10.0
"""Seconds between the loss of the agent and the watcher's exit: longer than a step and an orderly shutdown."""

GATE_POLL_S = 0.001
"""Between two questions to a closed gate.  Half: a core busy with reading; double: as much is lost in each pause."""


def serve(link: int, config: EngineConfig) -> int:
    """Run an engine on the agent's socket until it ends; returns the exit code."""
    signal.signal(signal.SIGTERM, _leave)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sock: EngineSocket[FromEngine] = EngineSocket(link, to_engine, from_engine)
    threading.Thread(target=_watch_hangup, args=(sock.fileno(),), daemon=True, name="hangup").start()
    try:
        return _Loop(sock, config).run()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return 0


_NOT_BEGUN: Future[None] = Future()
"""The check of an update that waits for the one before it."""


class _WorkerDied(Exception):
    pass


class _Loop:
    def __init__(self, sock: EngineSocket[FromEngine], config: EngineConfig) -> None:
        self._socket, self._pulse = sock, Pulse(sock.send)
        self._config = config
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._worker_died = threading.Event()
        self._updates: deque[tuple[UpdateWeights, Future[None]]] = deque()
        self._pacer = Pacer()
        self._beat = self._began = 0.0
        self._engine: RolloutEngine | None = None
        self._checker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="weights")

    def run(self) -> int:
        try:
            self._engine = RolloutEngine(self._config, self._on_worker_death, self._wait_free)
            ready = self._engine.warm_up(self._wait_open)
            self._pulse.end()
            self._socket.send(ready)
            while True:
                with self._pulse.phase(ENGINE_STEP):
                    self._run_pass(self._engine)
        except (EOFError, BrokenPipeError, ConnectionResetError):
            raise
        except Exception as error:
            traceback.print_exc()
            self._report_fatal(f"{type(error).__name__}: {error}")
            return 1
        finally:
            self._checker.shutdown(wait=False, cancel_futures=True)
            if self._engine is not None:
                self._engine.close()

    def _run_pass(self, engine: RolloutEngine) -> None:
        self._began = time.monotonic()
        while (message := self._socket.receive(timeout=0)) is not None:
            self._handle(engine, message)
        if self._apply_checked(engine):
            # A weight update does not count as time of the next step.
            self._began = time.monotonic()
        if self._worker_died.is_set():
            raise _WorkerDied("a vLLM worker process died.")
        work = engine.busy
        if work and not engine.may_step():
            self._pause(engine)
            return
        replies: list[FromEngine] = [*engine.step()] if work else []
        if self._pacer.due(time.monotonic(), work, engine.busy):
            replies.append(engine.stats())
        self._socket.send_many(replies)
        if work:
            self._log_step(engine)
        if not engine.busy:
            if engine.step_log is not None:
                engine.step_log.flush()
            self._wait(engine)

    def _log_step(self, engine: RolloutEngine) -> None:
        if engine.step_log is not None:
            engine.step_log.ended(time.monotonic() - self._began)

    def _handle(self, engine: RolloutEngine, message: ToEngine) -> None:
        if isinstance(message, Generate):
            try:
                refused = engine.submit(message)
            except DuplicateRequest as error:
                self._socket.send(EngineFailed(what=str(error), fatal=False))
            else:
                self._socket.send_many([refused] if refused else [])
        elif isinstance(message, Abort):
            aborted = engine.abort(message.rid)
            self._socket.send_many([aborted] if aborted else [])
        elif isinstance(message, UpdateWeights):
            self._updates.append((message, _NOT_BEGUN))
            self._pulse.begin(WEIGHTS)
            self._check_next(engine)
        elif isinstance(message, Sleep):
            self._socket.send_many([*engine.sleep(), engine.stats()])
            self._log_step(engine)
        elif isinstance(message, Wake):
            with self._pulse.phase(WAKE):
                engine.wake()

    def _apply_checked(self, engine: RolloutEngine) -> bool:
        due = False
        while self._updates and self._updates[0][1].done():
            update, checked = self._updates[0]
            try:
                checked.result()
                if not engine.staged():
                    break
                due = True
                if not engine.settled():
                    break
                self._socket.send_many(engine.drain())
                self._log_step(engine)
                self._socket.send(engine.apply(update))
            except WeightFileError as error:
                self._socket.send(WeightsRefused(update.version, str(error), isinstance(error, NoVersion)))
            self._updates.popleft()
            if self._updates:
                self._pulse.begin(WEIGHTS)
            else:
                self._pulse.end(WEIGHTS)
            self._check_next(engine)
        return due

    def _check_next(self, engine: RolloutEngine) -> None:
        """Begin with the oldest update; only one holds an image's lease."""
        if self._updates and self._updates[0][1] is _NOT_BEGUN:
            update, _ = self._updates[0]
            future = self._checker.submit(engine.check, update)
            self._updates[0] = update, future
            future.add_done_callback(self._wake)

    def _wait(self, engine: RolloutEngine) -> None:
        stood = engine.stands_still
        with self._pulse.phase(IDLE):
            idle = self._select(POLL_S if self._updates or stood else IDLE_INTERVAL_S)
        due = not (self._updates or stood) or time.monotonic() - self._beat >= IDLE_INTERVAL_S
        if stood:
            engine.may_step()
        if (idle and due) or stood is not engine.stands_still:
            # Heartbeat.
            self._beat = time.monotonic()
            self._socket.send(engine.stats())

    def _wait_free(self) -> None:
        """Before a step of the start."""
        if self._config.gate is not None:
            gate = GatedStart(self._config.gate)
            with self._pulse.phase(PAUSED):
                while not gate.may_begin():
                    time.sleep(GATE_POLL_S)

    def _wait_open(self, engine: RolloutEngine) -> None:
        """Before a step of the warm-up profile; the agent's messages wait."""
        with self._pulse.phase(PAUSED):
            while not engine.may_step():
                self._report_paused(engine)
                time.sleep(GATE_POLL_S)

    def _pause(self, engine: RolloutEngine) -> None:
        self._report_paused(engine)
        if self._updates:
            # The users of the device may hold it up.
            self._pulse.begin(WEIGHTS)
        with self._pulse.phase(PAUSED):
            self._select(GATE_POLL_S)

    def _report_paused(self, engine: RolloutEngine) -> None:
        if self._pacer.due(time.monotonic(), worked=False, busy=True):
            self._socket.send(engine.stats())

    def _select(self, timeout: float) -> bool:
        """Whether nothing came for so long."""
        idle = not any(select.select([self._socket.fileno(), self._wake_read], [], [], timeout))
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_read, 4096)
        return idle

    def _wake(self, _: Any = None) -> None:
        # A full pipe wakes as well as one more byte.
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_write, b"!")

    def _on_worker_death(self) -> None:
        self._worker_died.set()
        self._wake()

    def _report_fatal(self, what: str) -> None:
        failed: list[FromEngine] = [*self._engine.fail(what)] if self._engine is not None else []
        with contextlib.suppress(OSError):
            self._socket.send_many([*failed, EngineFailed(what=what, fatal=True)])


def _leave(signum: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(0)


def _watch_hangup(fd: int) -> None:
    poll = select.poll()
    poll.register(fd, select.POLLRDHUP)
    poll.poll()
    time.sleep(HANGUP_GRACE_S)
    os._exit(1)
