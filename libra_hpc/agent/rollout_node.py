"""The rollout half of a node agent: owns the vLLM engines and passes turns, answers and weights to and from the mesh.

- An engine started, restarted or woke -> it asks for the newest weights, and `EngineUp` follows once it has them.
- Standby -> the process lives with its device memory released; coming back costs a weight update, not a start.
- An engine is late (`EngineWatch`) -> event ``slow``.
- It hangs -> event ``hung``, `EngineDown`, stacks into its log, SIGKILL.
- Its process lives `EXIT_S` later (a call into a device or file system) -> ``hung`` again every `REPEAT_S`.
- Its process lives -> no other is started beside it.
- A process ends unasked -> `EngineDied`, and the coordinator orders the next start.
- It ended too often (`NodeEngine.ended_too_often`) -> `Fatal`.
"""

from __future__ import annotations

import asyncio
import functools
import os
import time
from typing import Any

import msgspec

from libra_hpc.mesh.agent_context import AgentContext
from libra_hpc.process.child import Child
from libra_hpc.process.deadlines import stall_of
from libra_hpc.process.visible_devices import engine_environment
from libra_hpc.protocol import mesh as wire
from libra_hpc.protocol.rollout import (
    EngineError,
    EngineReady,
    EngineStats,
    Generate,
    Generated,
    Shutdown,
    Sleep,
    UpdateWeights,
    Wake,
    WeightsApplied,
    from_engine,
    to_engine,
)
from libra_hpc.weights.flow import WeightFile
from libra_hpc.weights.relay import Receiver

from .commands import engine_command
from .engine_start import engine_config
from .engine_watch import START, WAKE, WEIGHTS, EngineWatch
from .node_engine import NodeEngine

KIND = "rollout"
ASK_AGAIN_S = 1.0
"""Between two requests for weights that the trainers have not exported yet."""
WATCH_S = 1.0
"""Between two checks of the deadlines; the shortest deadline is a minute."""
EXIT_S, REPEAT_S = 10.0, 60.0
"""A killed process is gone within a second, unless the kernel waits for something.

Half or double changes only when and how often that is logged.
"""


class RolloutNode:
    def __init__(self, context: AgentContext) -> None:
        self._context = context
        rollout, node = context.config.rollout, context.layout.engine_node(context.rank)
        serves = context.component in ("hybrid", "rollout")
        self._tp, count = rollout.on_node(node) if serves else (1, 0)
        self._restarts = context.config.deadlines.restarts
        self._engines = {
            name: NodeEngine(name, self._restarts) for name in (f"r{context.rank}.{i}" for i in range(count))
        }
        self._watch = EngineWatch(context.config.deadlines)
        self._changing = asyncio.Lock()
        """Held while processes are started or all of them ended."""
        self._receiver = Receiver(
            context.shared_memory,
            context.send,
            complete=self._weights_complete,
            request=lambda have: context.send(context.layout.train_leader, wire.WeightsWanted(context.rank, have)),
            log=functools.partial(context.log, rank=context.rank),
            deadlines=context.config.deadlines,
        )
        self._again: asyncio.TimerHandle | None = None
        """The next request for weights that did not exist at the last one."""
        self._wanted = False
        self._ordered_at = 0.0
        self._outbox: list[tuple[str, Generated]] = []

    @property
    def states(self) -> dict[str, str]:
        return {e.name: e.state for e in self._engines.values() if e.child is not None}

    @property
    def pids(self) -> dict[str, int]:
        return {e.name: e.child.pid for e in self._engines.values() if e.child is not None and not e.child.ended}

    @property
    def version(self) -> int:
        """Lowest version of the ready engines, -1 without one."""
        return min((e.version for e in self._engines.values() if e.state == "ready"), default=-1)

    @property
    def weights(self) -> WeightFile | None:
        """The newest weights that this node has received."""
        return self._receiver.newest

    async def start(self) -> None:
        async with self._changing:
            self._wanted, self._ordered_at = True, time.monotonic()
            for engine in self._engines.values():
                if engine.state == "standby" and engine.child is not None:
                    # Waking leaves an engine without weights, so it needs a file even when the version it had is still
                    # the newest.
                    engine.state, engine.version, engine.updating = "loading", -1, -1
                    engine.child.send(Wake())
                    self._watch.began(engine.name, WAKE, self._ordered_at)
                    self._catch_up(engine)
                elif engine.state == "lost":
                    await self._spawn(engine)
            self._maybe_ready()

    def standby(self) -> None:
        self._wanted = False
        for engine in self._engines.values():
            if engine.child is not None and engine.state in ("ready", "loading"):
                engine.state = "standby"
                engine.child.send(Sleep())
                # It answers no update any more.
                self._watch.gone(engine.name)
                self._watch.sign(engine.name, time.monotonic())
                self._context.send_to_rollout_leader(wire.EngineDown(self._context.rank, engine.name, "standby"))

    async def stop(self) -> None:
        self._wanted = False
        for engine in self._engines.values():
            self._watch.gone(engine.name)
            if engine.child is not None and not engine.child.ended:
                engine.child.stopping = True
                engine.child.send(Shutdown())
        await asyncio.gather(*(e.child.stop() for e in self._engines.values() if e.child is not None))

    async def reset(self) -> None:
        """End every engine unreported: a lost node is readmitted."""
        async with self._changing:
            children = [engine.child for engine in self._engines.values() if engine.child is not None]
            self._wanted, self._outbox = False, []
            for engine in self._engines.values():
                self._watch.gone(engine.name)
            self._engines = {name: NodeEngine(name, self._restarts) for name in self._engines}
            self._receiver.reset()
            await asyncio.gather(*(child.stop(0.0) for child in children))

    async def watch(self) -> None:
        """End engines that hang and ask for weights that do not arrive, until cancelled."""
        checked_at = time.monotonic()
        while True:
            await asyncio.sleep(WATCH_S)
            now = time.monotonic()
            if stall := stall_of(now - checked_at, WATCH_S):
                self._watch.discount(stall)
                self._receiver.discount(stall)
            self._receiver.watch(now)
            await self._end_hung(now)
            checked_at = time.monotonic()

    def on_turns(self, message: wire.Turns) -> None:
        for name, request in message.items:
            engine = self._engines.get(name)
            if engine is not None and engine.child is not None and engine.state == "ready":
                engine.child.send(request)
            elif isinstance(request, Generate):
                self._answer(name, _refused(request, "engine is not ready"))

    def on_chunk(self, message: wire.WeightsChunk, blob: bytes | bytearray) -> None:
        self._receiver.chunk(message, blob, time.monotonic())

    def on_current(self, message: wire.WeightsCurrent) -> None:
        """The engines have the newest weights."""
        self._receiver.answered()
        # The trainers may have a newer state than any checkpoint, and may not have exported it yet.
        version = max(message.version, self._context.start.step)
        for engine in self._engines.values():
            if engine.state == "loading" and engine.version >= version:
                self._up(engine)
        # One timer for the node: every request has an answer, and every answer comes here.
        if self._again is None and self._waiting():
            self._again = asyncio.get_running_loop().call_later(ASK_AGAIN_S, self._ask_again)

    def _waiting(self) -> list[NodeEngine]:
        """Engines that lack weights which are not on their way to them."""
        return [e for e in self._engines.values() if e.state == "loading" and e.updating < 0 and e.child is not None]

    def _ask_again(self) -> None:
        self._again = None
        for engine in self._waiting():
            self._catch_up(engine)

    # --- engines

    async def _spawn(self, engine: NodeEngine) -> None:
        context, rollout = self._context, self._context.config.rollout
        config = await asyncio.to_thread(engine_config, context, engine.name, tp=self._tp, newest=self._receiver.newest)
        path = context.private / f"{engine.name}.json"
        path.write_bytes(msgspec.json.encode(config))
        engine.state, engine.ready, engine.updating, engine.hung, engine.reported = "starting", None, -1, "", None
        engine.child = Child(
            engine.name,
            context.private / f"{engine.name}.sock",
            outbound=to_engine,
            inbound=from_engine,
            on_message=self._message,
            on_exit=self._exited,
        )
        argv = engine_command(context.config, context.component, path)
        first = list(self._engines).index(engine.name) * self._tp
        environment = engine_environment(
            os.environ, config.device, first=first, count=self._tp, threads=rollout.threads
        )
        engine.starts += 1
        self._watch.began(engine.name, START, time.monotonic())
        await engine.child.start(argv, environment, context.logs / f"{engine.name}.log")

    def _message(self, child: Child, message: Any) -> None:
        engine, now = self._engines[child.name], time.monotonic()
        if child is not engine.child or engine.hung:
            return
        match message:
            case Generated():
                self._answer(engine.name, message)
            case EngineStats():
                if not message.asleep:
                    self._watch.ended(engine.name, WAKE, now)
                if message != engine.reported:
                    engine.reported = message
                    self._context.send_to_rollout_leader(wire.EngineLoad(engine.name, message))
            case WeightsApplied(version=version, seconds=seconds):
                engine.version = version
                self._watch.ended(engine.name, WAKE, now)
                self._watch.ended(engine.name, WEIGHTS, now)
                if version < engine.updating:
                    self._watch.began(engine.name, WEIGHTS, now)
                self._context.log(
                    "weights_applied", rank=self._context.rank, engine=engine.name, version=version, seconds=seconds
                )
                if engine.state == "ready":
                    self._context.send_to_rollout_leader(wire.EngineVersion(self._context.rank, engine.name, version))
                elif engine.state == "loading":
                    self._catch_up(engine)
            case EngineReady():
                self._watch.ended(engine.name, START, now)
                engine.ready, engine.version, engine.state = message, message.version, "loading"
                self._catch_up(engine)
            case EngineError(what=what, fatal=fatal):
                self._context.log("engine_error", rank=self._context.rank, engine=engine.name, reason=what, fatal=fatal)
        self._watch.sign(engine.name, now)

    async def _end_hung(self, now: float) -> None:
        for late in self._watch.late(now):
            self._context.log("slow", rank=self._context.rank, part=late.engine, reason=late.reason)
        ends = []
        for hung in self._watch.hung(now):
            engine = self._engines[hung.engine]
            if engine.child is not None and not engine.child.ended:
                self._log_hung(engine, hung.reason, now)
                engine.hung, engine.state, engine.killed_at = hung.reason, "ending", now
                # A process may outlive its SIGKILL, and its turns need not wait for that.
                self._context.send_to_rollout_leader(wire.EngineDown(self._context.rank, engine.name, hung.reason))
                if hung.hopeless:
                    where = self._context.logs / f"{engine.name}.log"
                    self._context.send(0, wire.Fatal(self._context.rank, f"{hung.hopeless}; see {where}"))
                ends.append(engine.child.end_hung())
        await asyncio.gather(*ends)
        for engine in self._engines.values():
            waited_s = now - engine.killed_at
            pause_s = REPEAT_S if engine.logged_at > engine.killed_at else 0.0
            if engine.state == "ending" and waited_s > EXIT_S and now - engine.logged_at > pause_s:
                reason = (
                    f"Its process has not ended {waited_s:.0f} s after SIGKILL; the next one is started when it has."
                )
                self._log_hung(engine, reason, now)

    def _log_hung(self, engine: NodeEngine, reason: str, now: float) -> None:
        engine.logged_at = now
        self._context.log("hung", rank=self._context.rank, part=engine.name, reason=reason)

    def _answer(self, name: str, generated: Generated) -> None:
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outbox.append((name, generated))

    def _flush(self) -> None:
        items, self._outbox = tuple(self._outbox), []
        self._context.send_to_rollout_leader(wire.TurnsDone(items))

    def _catch_up(self, engine: NodeEngine) -> None:
        """Bring one engine to the newest weights before it is announced."""
        assert engine.child is not None
        newest = self._receiver.newest
        if newest is not None and newest.version > engine.version:
            self._update(engine, newest)
        else:
            self._receiver.ask(engine.version, time.monotonic())

    def _update(self, engine: NodeEngine, file: WeightFile) -> None:
        assert engine.child is not None
        engine.updating = file.version
        self._watch.began(engine.name, WEIGHTS, time.monotonic())
        engine.child.send(UpdateWeights(str(file.path), file.version, file.crc32))

    def _up(self, engine: NodeEngine) -> None:
        assert engine.ready is not None
        engine.state, engine.starts, engine.reported = "ready", 0, None
        ready = msgspec.structs.replace(engine.ready, version=engine.version)
        self._context.send_to_rollout_leader(wire.EngineUp(self._context.rank, engine.name, ready))
        self._context.log(
            "engine_ready", rank=self._context.rank, engine=engine.name, version=engine.version, seconds=ready.start_s
        )
        self._maybe_ready()

    def _maybe_ready(self) -> None:
        if self._wanted and all(e.state == "ready" for e in self._engines.values()):
            self._context.send(0, wire.EngineIsReady(self._context.rank, KIND, time.monotonic() - self._ordered_at))

    def _weights_complete(self, file: WeightFile) -> None:
        for engine in self._engines.values():
            if engine.child is not None and engine.state in ("ready", "loading"):
                self._update(engine, file)

    def _exited(self, child: Child, code: int) -> None:
        engine = self._engines[child.name]
        if child is not engine.child:
            return
        was, engine.state, engine.version = engine.state, "lost", -1
        self._watch.gone(engine.name)
        if child.stopping:
            return
        reason = f"engine process ended with {code}" if code >= 0 else f"engine process was killed by signal {-code}"
        if engine.hung:
            reason = f"{reason}: {engine.hung}"
        self._context.log("engine_lost", rank=self._context.rank, engine=engine.name, reason=reason, state=was)
        if not engine.hung:
            self._context.send_to_rollout_leader(wire.EngineDown(self._context.rank, engine.name, reason))
        often = engine.ended_too_often(time.monotonic())
        if not often:
            self._context.send(0, wire.EngineDied(self._context.rank, KIND, reason))
            return
        what = f"engine {engine.name} ended {often}, the last time because {reason}"
        self._context.send(0, wire.Fatal(self._context.rank, f"{what}; see {self._context.logs / engine.name}.log"))


def _refused(request: Generate, reason: str) -> Generated:
    return Generated(request.rid, b"", b"", "error", versions=(), cached_tokens=0, queue_s=0.0, run_s=0.0, error=reason)
