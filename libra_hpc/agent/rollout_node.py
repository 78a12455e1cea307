"""The rollout half of a node agent: owns the vLLM engines and passes turns, answers and weights to and from the mesh.

- An engine started, restarted or woke -> it asks for the newest weights, and is ``ready`` once it has them.
- Standby -> the process lives with its device memory released; coming back costs a weight update, not a start.
- The node's trainers still free their memory -> no engine starts or wakes until they have.
- An engine is late, stalled or ends too often -> as `Supervised`; a stalled one is ``ending`` at once.
- An engine cannot take new weights -> it is asked again each second.  At the third time it is ended, unless the image
  has none: the version does not wait for it, and the next engine begins with that.
- Its process lives -> no other is started beside it.
- A process ends unasked -> state ``lost``, and the coordinator orders the next start.
- All its engines are closed -> the node is quarantined, unless the run needs it.
"""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

import msgspec

from libra_hpc.mesh.agent_context import AgentContext
from libra_hpc.process.child import Child
from libra_hpc.process.child_environment import engine_environment
from libra_hpc.process.progress import Stall
from libra_hpc.protocol import agents as wire
from libra_hpc.protocol.engine import (
    EngineFailed,
    Generate,
    Generated,
    Sleep,
    UpdateWeights,
    Wake,
    WeightsApplied,
    WeightsRefused,
    from_engine,
    refusal,
    to_engine,
)
from libra_hpc.protocol.engine_state import EngineCapacity, EngineReady, EngineStats, ObservedEngine, WeightUpdate
from libra_hpc.protocol.joining import is_guest

from .child_start import child_command, engine_config
from .node_carrier import NodeCarrier
from .supervised import ChildCommand, EngineNode, Supervised

ASK_AGAIN_S = 1.0
"""Between two requests for weights that the trainers have not offered yet, or that an engine could not take."""
REFUSALS = 3
"""At which an engine is ended.  Half: one call that fails costs a start; double: turns wait so much longer."""
NEWEST_S = 30.0
"""For which engines that wake wait for the weights with which their node trained last. Half: over slow links they load
older ones before; double: after a loss of the trainers they serve so much later."""


LOADS_S = 0.25
"""Between two reports of loads; an engine has one every 0.5 s.  Half: twice the messages; double: turns go to engines
that are full already."""


class VllmEngine(Supervised):
    """One vLLM engine: a single process."""

    capacity: EngineCapacity | None = None
    start_s = 0.0
    """Seconds of its start."""
    update: WeightUpdate | None = None
    version = -1
    updating = -1
    """The newest version it was sent."""
    refused = 0
    """How often in a row it could not take new weights that its node has."""
    closed = False
    """Whether it computed wrongly too often to be started again."""
    reported: EngineStats | None = None
    """The counters that the rollout leader has."""

    def observed(self, kind: str) -> ObservedEngine:
        capacity = self.capacity if self.state == "ready" else None
        return ObservedEngine(
            kind, self.state, self.version, self.ends, self.reason, capacity, self.update, self.ordered
        )


class RolloutNode(EngineNode[VllmEngine]):
    engine, kind, outbound, inbound = VllmEngine, "rollout", to_engine, from_engine

    def __init__(self, context: AgentContext, carrier: NodeCarrier) -> None:
        self._tp, count = context.engines
        less = "a smaller rollout.kv_cache_mb" if context.config.slurm.device == "cpu" else ""
        super().__init__(context, [f"r{context.rank}.{i}" for i in range(count)], less=less)
        self._carrier = carrier
        self._again: asyncio.TimerHandle | None = None
        """The next request for weights that did not exist at the last one."""
        self._wanted = False
        self._outbox: list[tuple[str, Generated]] = []
        self._loads: dict[str, EngineStats] = {}
        """What has changed since the last report."""

    @property
    def weights(self) -> int:
        """Lowest version of the ready engines, -1 without one."""
        return min((e.version for e in self._engines.values() if e.state == "ready"), default=-1)

    @property
    def generated(self) -> dict[str, int]:
        """Tokens by engine, since each was started."""
        return {e.name: e.reported.generated_tokens for e in self._engines.values() if e.reported is not None}

    @property
    def asleep(self) -> bool:
        """Whether no engine has device memory."""
        return not self._frees and {e.state for e in self._engines.values()} <= {"standby", "lost", "closed"}

    @property
    def serves(self) -> bool:
        """Whether every engine takes turns."""
        return {e.state for e in self._engines.values()} == {"ready"}

    async def start(self, starts: int = 0, world: int = 0) -> None:
        self._wanted, self._ordered_at = True, time.monotonic()
        await self.room()
        async with self._changing:
            # It may have been ordered back meanwhile.
            for engine in self._engines.values() if self._wanted else ():
                if engine.state == "standby":
                    # Waking leaves an engine without weights, so it needs them even when the version it had is still
                    # the newest.
                    engine.state, engine.version, engine.updating = "loading", -1, -1
                    engine.send(Wake())
                    self._catch_up(engine)
                elif engine.state == "lost":
                    await self._spawn(engine)
            self.acted(starts)

    def standby(self) -> None:
        self._wanted = False
        for engine in self._engines.values():
            if engine.state in ("ready", "loading"):
                engine.state = engine.reason = "standby"
                self._frees.add(engine.name)
                engine.send(Sleep())
        self._update_carrier()

    async def stop(self) -> None:
        self._wanted = False
        await super().stop()

    async def reset(self) -> None:
        async with self._changing:
            self._wanted, self._outbox = False, []
            for engine in self._engines.values():
                self.has_freed(engine.name)
                engine.version = -1
            await asyncio.gather(*(engine.reset() for engine in self._engines.values()))

    async def stalled(self, engine: VllmEngine, stall: Stall) -> None:
        # A process may outlive its SIGKILL, and its turns need not wait for that.
        engine.state, engine.reason = "ending", stall.sentence
        await engine.end_hung(stall.sentence)

    def on_turns(self, message: wire.Turns) -> None:
        for name, request in message.items:
            engine = self._engines.get(name)
            serves = engine is not None and engine.state == "ready"
            if engine is not None and serves and isinstance(request, wire.WrongEngine):
                engine.closed = request.closed
                self._end(engine, request.reason)
            elif engine is not None and serves:
                engine.send(request)
            elif isinstance(request, Generate):
                self._answer(name, refusal(request.rid, "engine is not ready"))

    def on_image(self) -> None:
        for engine in self._engines.values():
            if engine.state in ("ready", "loading"):
                if self._carrier.version < 0:
                    engine.updating = -1
                self._update(engine)

    def on_current(self, message: wire.WeightsCurrent) -> None:
        """The engines have the newest weights."""
        # The trainers may have a newer state than any checkpoint, and may not have offered it yet.
        version = max(message.version, self._context.resume_point.step)
        for engine in self._engines.values():
            if engine.state == "loading" and engine.version >= version:
                self._up(engine)
        self._ask_later()

    def _ask_later(self) -> None:
        # One timer for the node: every request has an answer, and every answer comes here.
        if self._again is None and self._waiting():
            self._again = asyncio.get_running_loop().call_later(ASK_AGAIN_S, self._ask_again)

    def _waiting(self) -> list[VllmEngine]:
        """Engines that lack weights which are not on their way to them."""
        live, here = ("ready", "loading"), self._carrier.version
        return [
            e
            for e in self._engines.values()
            if (e.state in live and max(e.version, e.updating) < here) or (e.state == "loading" and e.updating < 0)
        ]

    def _ask_again(self) -> None:
        self._again = None
        for engine in self._waiting():
            self._catch_up(engine)

    # --- engines

    async def _spawn(self, engine: VllmEngine) -> None:
        context, rollout = self._context, self._context.config.rollout
        version = self._carrier.version
        image = self._carrier.image if version >= 0 else None
        config = await asyncio.to_thread(engine_config, context, engine.name, self._tp, image, version)
        path = context.private / f"{engine.name}.json"
        path.write_bytes(msgspec.json.encode(config))
        first = list(self._engines).index(engine.name) * self._tp
        environment = engine_environment(
            os.environ, context.config.slurm.device, first=first, count=self._tp, threads=rollout.threads
        )
        argv = child_command(context.config, "engine", path)
        engine.state, engine.update, engine.updating, engine.reported = "starting", None, -1, None
        engine.refused = 0
        await engine.start([ChildCommand(engine.name, argv, environment)])

    def received(self, engine: VllmEngine, process: int, message: Any) -> None:
        if engine.hung:
            return
        match message:
            case Generated():
                self._answer(engine.name, message)
            case EngineStats():
                if message.asleep:
                    self.has_freed(engine.name)
                if message != engine.reported:
                    engine.reported = message
                    if not self._loads:
                        asyncio.get_running_loop().call_later(LOADS_S, self._report_loads)
                    self._loads[engine.name] = message
            case WeightsApplied(version=version, seconds=pause_s, stage_s=stage_s, recomputed=recomputed):
                engine.version, engine.refused = version, 0
                self._update_carrier()
                if engine.state == "ready":
                    wire_s, image_s = self._carrier.wire_s, self._carrier.image_s
                    engine.update = WeightUpdate(version, wire_s, image_s, stage_s, pause_s, recomputed)
                    self._context.changed()
                elif engine.state == "loading":
                    self._catch_up(engine)
            case EngineReady(version=version, capacity=capacity, seconds=seconds):
                engine.capacity, engine.start_s, engine.version, engine.state = capacity, seconds, version, "loading"
                self._catch_up(engine)
            case WeightsRefused(version=version, what=what, absent=absent):
                engine.updating, what = engine.version, f"it cannot take version {version} of the weights: {what}"
                self._context.log("engine_error", rank=self._context.rank, engine=engine.name, reason=what, fatal=False)
                engine.refused += not absent
                if engine.refused >= REFUSALS and engine.state in ("ready", "loading"):
                    self._end(engine, what)
                self._ask_later()
            case EngineFailed(what=what, fatal=fatal):
                self._context.log("engine_error", rank=self._context.rank, engine=engine.name, reason=what, fatal=fatal)

    def _report_loads(self) -> None:
        loads, self._loads = self._loads, {}
        self._context.send_to_rollout_leader(wire.EngineLoads(loads))

    def _answer(self, name: str, generated: Generated) -> None:
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outbox.append((name, generated))

    def _flush(self) -> None:
        items, self._outbox = self._outbox, []
        # Those of all turns of a node might be more than a message may have.
        parts = [(item,) for item in items if item[1].experts] + [tuple(item for item in items if not item[1].experts)]
        for part in filter(None, parts):
            self._context.send_to_rollout_leader(wire.TurnsDone(part))

    def _catch_up(self, engine: VllmEngine) -> None:
        """Bring one engine to the newest weights before it is announced."""
        if not self._update(engine) and engine.updating <= engine.version:
            context = self._context
            have = self._carrier.version if self._newer_comes() else engine.version
            context.send(context.layout.train_leader, wire.WeightsWanted(context.rank, have))

    def _newer_comes(self) -> bool:
        """Whether the node trained with newer weights than its image has."""
        trained = self.beside.trained if self.beside is not None else -1
        return self._carrier.version < trained and time.monotonic() - self._ordered_at < NEWEST_S

    def _update(self, engine: VllmEngine) -> bool:
        """Have an engine load the image, if that has a newer version than it has or gets."""
        version = self._carrier.version
        if version <= max(engine.version, engine.updating) or self._newer_comes():
            return False
        engine.updating = version
        engine.send(UpdateWeights(str(self._carrier.image), version, tuple(self._carrier.changes)))
        return True

    def _up(self, engine: VllmEngine) -> None:
        engine.state, engine.starts, engine.reported = "ready", 0, None
        known = {"rank": self._context.rank, "engine": engine.name}
        self._context.log("engine_ready", **known, version=engine.version, seconds=engine.start_s)

    def _update_carrier(self) -> None:
        """Engines that have no weights begin with the image."""
        live = [e.version for e in self._engines.values() if e.state in ("ready", "loading") and e.version >= 0]
        self._carrier.engines_have(min(live, default=None))

    def _end(self, engine: VllmEngine, reason: str) -> None:
        # Its turns and the version do not wait for the end of its process.
        engine.state, engine.reason, engine.hung = "ending", reason, reason
        engine.kill()

    def exited(self, engine: VllmEngine, child: Child, reason: str) -> None:
        was, engine.version = engine.state, -1
        if child.stopping:
            engine.state = "lost"
        else:
            engine.state, engine.reason, engine.ends = "closed" if engine.closed else "lost", reason, engine.ends + 1
        self.has_freed(engine.name)
        self._update_carrier()
        if child.stopping:
            return
        rank = self._context.rank
        self._context.log("engine_lost", rank=rank, engine=engine.name, reason=reason, was=was)
        if engine.closed and is_guest(rank):
            engine.restart_all(f"{engine.title} is closed: {reason}")
        elif not engine.closed:
            engine.ends_too_often(reason, time.monotonic())
