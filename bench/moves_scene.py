"""A core node and a hybrid node in one process: the product's agent halves, train leader and pool, without Slurm.

The rollout leader is played: it aborts the turns of a node that drains, as for a move within a step. A second rollout
node has no engine; the pool wants one that stays.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from libra_hpc.agent.node_carrier import NodeCarrier
from libra_hpc.agent.rollout_node import RolloutNode
from libra_hpc.agent.routes import Routes, add_engines, add_train_leader
from libra_hpc.agent.train_node import TrainNode
from libra_hpc.annexes.calibrate.measure_training import random_samples
from libra_hpc.config.run import RunConfig
from libra_hpc.coordinator.nodes import NodePool
from libra_hpc.facts.rundir import RunDir
from libra_hpc.mesh.agent_context import AgentContext
from libra_hpc.mesh.rank_layout import RankLayout
from libra_hpc.policies.pool import states
from libra_hpc.process.agent_folders import make_folders, remove
from libra_hpc.protocol import agents as wire
from libra_hpc.protocol.codec import pack_i32
from libra_hpc.protocol.engine import Abort, Generate
from libra_hpc.protocol.engine_state import EngineState
from libra_hpc.protocol.trainer import Joined
from libra_hpc.train_leader.train_leader_setup import make_train_leader, rendezvous_folder

LAYOUT = RankLayout(("planner", "train", "hybrid", "rollout"))
PLANNER, CORE, HYBRID, LEADER = range(4)
PATIENCE_S = 300.0
"""Longest wait for one part of a move: the first start of an engine on a busy machine takes a minute."""


class SceneNode:
    """The agent of one node, without heartbeats."""

    def __init__(self, context: AgentContext, spawn: Callable[[Coroutine[Any, Any, Any]], object]) -> None:
        self.context, self.routes = context, Routes()
        self.carrier = NodeCarrier(context, self._on_image)
        self.rollout, self.train = RolloutNode(context, self.carrier), TrainNode(context, self.carrier)
        add_engines(self.routes, self.rollout, self.train, self.carrier, spawn)
        self.routes.add(wire.Roles, self._on_roles)

    def _on_image(self) -> None:
        self.rollout.on_image()
        self.train.on_image()

    def _on_roles(self, roles: wire.Roles) -> None:
        self.context.receivers = roles.receivers

    async def stop(self) -> None:
        await asyncio.gather(self.rollout.stop(), self.train.stop(), self.carrier.stop())


class Scene:
    """Both nodes at work; every message between them gets its time."""

    def __init__(self, config: RunConfig, run: RunDir, vocab: int, tokens: int) -> None:
        """``tokens`` of each of the two trajectories of a step."""
        self.vocab, self.tokens = vocab, tokens
        self.marks: dict[str, float] = {}
        """When something first happened since `mark` was cleared, monotonic seconds."""
        self.figures: dict[str, float] = {}
        """What the parts say of themselves in this move."""
        self.step = 0
        self._tasks: set[asyncio.Task[Any]] = set()
        self._turns: set[str] = set()
        self._changed = asyncio.Event()
        self._folders: list[Path] = []
        contexts = [self._context(rank, config, run) for rank in (PLANNER, CORE, HYBRID)]
        self.nodes = [SceneNode(context, self.spawn) for context in contexts[1:]]
        self.pool = NodePool(contexts[PLANNER], lambda kind, **fields: None, lambda *move: None, lambda: self.step)
        self.leader = make_train_leader(contexts[CORE], rendezvous_folder(contexts[CORE]))
        add_train_leader(self.nodes[0].routes, self.leader)

    def _context(self, rank: int, config: RunConfig, run: RunDir) -> AgentContext:
        private, shared = make_folders()
        self._folders += [private, shared]
        start = wire.Welcome(0, "", 0, ())
        return AgentContext(rank, LAYOUT, config, run, 1, self.send, start, private, shared, secret=b"moves")

    def spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def __aenter__(self) -> Scene:
        for node in self.nodes:
            self.spawn(node.carrier.start())
            self.spawn(node.rollout.watch())
            self.spawn(node.train.watch())
        self.spawn(self.leader.run())
        self.pool.start("rollout")
        await self.until(lambda: self.state(CORE) == "train" and self.state(HYBRID) == "rollout")
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(*(node.stop() for node in self.nodes))
        for task in self._tasks:
            task.cancel()
        for folder in self._folders:
            remove(folder)

    # --- what a run does

    def state(self, rank: int) -> str:
        assert self.pool.pool is not None
        return str(self.pool.pool.nodes[rank].state)

    def turn(self, name: str, tokens: int) -> None:
        """Send a turn to the hybrid node's engine."""
        self._turns.add(name)
        prompt = pack_i32([number % self.vocab for number in range(32)])
        engine = next(iter(self.nodes[1].rollout.states))
        self.send(HYBRID, wire.Turns(((engine, Generate(name, prompt, tokens)),)))

    async def move(self, to: str) -> None:
        """Order the hybrid node into the other stage, and wait until it is there."""
        self.mark("ordered")
        self.pool.move(HYBRID, "train" if to == "train" else "rollout", time.time(), abort=True)
        await self.until(lambda: self.state(HYBRID) == to)
        self.mark("done")

    async def train(self) -> float:
        """One step on the present members; its seconds."""
        step, begin = self.step + 1, time.monotonic()
        samples = random_samples(2, self.tokens, self.vocab)
        self.send(CORE, wire.Batch(step, (wire.Group(step - 1, samples),), {}))
        await self.until(lambda: self.step == step)
        return time.monotonic() - begin

    async def first_token(self) -> None:
        self.turn("first", 1)
        await self.until(lambda: not self._turns)

    # --- the mesh

    def clear(self) -> None:
        self.marks, self.figures = {}, {}

    def mark(self, name: str) -> None:
        self.marks.setdefault(name, time.monotonic())

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    def send(self, rank: int, message: Any) -> None:
        """Delivered one pass of the event loop later."""
        asyncio.get_running_loop().call_soon(self._deliver, rank, message)

    def _deliver(self, rank: int, message: Any) -> None:
        self._note(rank, message)
        if rank == PLANNER:
            self._coordinate(message)
        elif rank == LEADER:
            self._lead(message)
        else:
            self.nodes[rank - 1].routes.deliver(message)
        self._changed.set()

    def _note(self, rank: int, message: Any) -> None:
        match message:
            case wire.FromReplica(rank=source, message=Joined() as joined):
                who = "core" if source == CORE else "replica"
                self.mark(f"{who} joined")
                self.figures[f"{who} joins"] = joined.seconds
                self.figures |= {"memory": joined.memory_s, "weights": joined.weights_s} if who == "replica" else {}
                self.figures["bytes"] = self.figures.get("bytes", 0) + joined.received_bytes
            case wire.Log(kind="weights_applied", fields=fields):
                self.mark("weights applied")
                self.figures |= {name: value for name, value in fields.items() if isinstance(value, float)}
                self.figures["updates"] = self.figures.get("updates", 0) + 1
            case wire.WeightsHere() if message.rank == HYBRID:
                self.mark("weights here")
            case wire.ToReplica() | wire.StandbyEngine() | wire.StartEngine() | EngineState():
                kind = type(getattr(message, "message", message)).__name__
                about = getattr(message, "rank", rank)
                self.mark(f"{kind} {about} {getattr(message, 'kind', '')}".strip())
            case _:
                self.mark(type(message).__name__)

    def _coordinate(self, message: Any) -> None:
        match message:
            case EngineState() | wire.TurnsDrained():
                self.pool.apply(message)
            case wire.MemberJoined(rank=rank, generation=generation):
                self.pool.apply(states.StateArrived(rank))
                self.pool.apply(states.MemberOf(rank, generation))
            case wire.StepReport(step=step):
                self.step = step
            case wire.Fatal(reason=reason):
                raise RuntimeError(reason)

    def _lead(self, message: Any) -> None:
        match message:
            case wire.StartEngine(rank=rank):
                self.send(PLANNER, EngineState(rank, "rollout", "ready"))
            case wire.TurnsDone(items=items):
                self._turns.difference_update(answer.rid for _, answer in items)
                self._drained()
            case wire.DrainTurns():
                engine = next(iter(self.nodes[1].rollout.states))
                self.send(HYBRID, wire.Turns(tuple((engine, Abort(name)) for name in self._turns)))
                self._drained()

    def _drained(self) -> None:
        if not self._turns and self.state(HYBRID) == "to_train" and "TurnsDrained" not in self.marks:
            self.mark("TurnsDrained")
            self.send(PLANNER, wire.TurnsDrained(HYBRID))
