"""The training side as a whole, without a cluster: train leader, nodes and simulated trainer processes that are
killed."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import pytest

from libra_hpc.agent.node_carrier import NodeCarrier
from libra_hpc.agent.train_node import TrainNode
from libra_hpc.config.run import RunConfig
from libra_hpc.facts.rundir import RunDir
from libra_hpc.mesh.agent_context import AgentContext
from libra_hpc.mesh.rank_layout import RankLayout
from libra_hpc.models.architecture import read_shape
from libra_hpc.models.tensors import hf_shapes
from libra_hpc.protocol import agents as wire
from libra_hpc.protocol.carriers import Peer, Publish
from libra_hpc.protocol.codec import pack_f32, pack_i32
from libra_hpc.protocol.engine_state import EngineState
from libra_hpc.protocol.trainer import Sample
from libra_hpc.state.data_order import DataOrder
from libra_hpc.state.state_folders import DataPosition, read_position, verify
from libra_hpc.train_leader.train_leader import TrainLeader
from libra_hpc.train_leader.train_leader_setup import CheckpointStore
from tests.agent.weights_here import WrittenImage
from tests.protocol.step_reports import batch_stats

PATIENCE_S = 120.0
"""Less than the minute after which a member stops waiting for one that does not appear."""
STEPS = 12
RANKS = (1, 2, 3)


class Side:
    """The core, two replicas, the leader, and what a coordinator does about deaths: the ready ones are the next
    generation."""

    def __init__(self, folder: Path, engine: str) -> None:
        config = RunConfig.model_validate(
            {
                "run": {"engine": engine, "steps": STEPS},
                "train": {"snapshot_every": 1},
                "checkpoint": {"every": 0},
                "algorithm": {"skip_zero_advantage": False},
                "model": {"path": str(folder / "model")},
                "simulated": {
                    "model": "qwen3-8b",
                    "device": "a800",
                    "presets": ["math"],
                    "speedup": 100.0,
                    "start_s": 0.0,
                    "step_s": 20.0,
                },
                "components": {"train": {"gpus": 2}, "hybrid": {"nodes": 2, "gpus": 2}, "rollout": {"gpus": 2}},
            }
        )
        self.committed: list[wire.Committed] = []
        self.events: list[Any] = []
        self.ready: set[int] = set()
        self.generation = 0
        self.run = RunDir(folder / "run")
        self.run.path.mkdir(exist_ok=True)
        layout = RankLayout(("planner", "train", "hybrid", "hybrid", "rollout"))
        shapes = hf_shapes(read_shape(folder / "model")) if engine == "real" else None
        self.nodes: dict[int, TrainNode] = {}
        self.carriers: dict[int, WrittenImage] = {}
        for rank in RANKS:
            private, shm = folder / f"p{rank}", folder / f"s{rank}"
            private.mkdir(), shm.mkdir()
            start = wire.Welcome(0, "", 0, ())
            context = AgentContext(rank, layout, config, self.run, 1, self.send, start, private, shm)
            self.carriers[rank] = WrittenImage(shm, shapes, config.model.dtype)
            self.nodes[rank] = TrainNode(context, cast(NodeCarrier, self.carriers[rank]))
        self.leader = TrainLeader(
            config,
            (1,),
            0,
            DataOrder(),
            self.send,
            4,
            lambda: (),
            CheckpointStore(context),
            rendezvous=folder,
            checkpoints=self.run.checkpoints,
            index=self,
        )
        self.leader.weights.on_carrier(wire.CarrierStarted(Peer(1, ("127.0.0.1",), 1)))
        self.listed: list[int] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def add(self, position: DataPosition) -> None:
        self.listed.append(position.step)

    def send(self, rank: int, message: Any) -> None:
        """In the loop's next turn, as the mesh does it."""
        asyncio.get_running_loop().call_soon(self.deliver, rank, message)

    def deliver(self, rank: int, message: Any) -> None:
        match message:
            case wire.ToReplica(message=order):
                self.nodes[rank].on_message(order)
            case wire.SnapshotStored():
                self.leader.on_snapshot_stored(message)
            case wire.KeepSnapshot():
                self.nodes[rank].keeper.keep(message)
            case wire.FromReplica(rank=source, message=answer):
                self.leader.on_reply(source, answer)
            case EngineState(rank=source, state="lost", reason=reason) if rank == 1:
                self.leader.on_replica_down(source, reason)
            case EngineState(rank=source, state="lost"):
                self.ready.discard(source)
                self.order()
                self.spawn(self.nodes[source].start())
            case EngineState(rank=source):
                self.ready.add(source)
                self.order()
            case wire.Committed():
                self.committed.append(message)
            case wire.WeightsOffered():
                self.leader.on_offered(message)
            case Publish():
                self.carriers[rank].publish(message)
            case _:
                self.events.append(message)

    def order(self) -> None:
        self.generation += 1
        self.leader.on_generation(self.generation, tuple(sorted(self.ready)))

    def spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def kill(self, rank: int) -> None:
        os.kill(self.nodes[rank].pids[f"t{rank}.0"], signal.SIGKILL)

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                await asyncio.sleep(0.002)

    def joined(self) -> list[tuple[int, int]]:
        return [(event.generation, event.rank) for event in self.events if isinstance(event, wire.MemberJoined)]

    def play(self, script: Callable[[], Awaitable[None]]) -> None:
        async def main() -> None:
            for rank in RANKS:
                self.spawn(self.nodes[rank].start())
            self.spawn(self.leader.run())
            try:
                await script()
            finally:
                await asyncio.gather(*(node.stop() for node in self.nodes.values()))
                for task in list(self._tasks):
                    task.cancel()

        asyncio.run(main())

    def batch(self, step: int) -> None:
        sample = Sample(f"{step}.0", pack_i32([1] * 8), b"\0" + b"\1" * 7, pack_f32([0.0] * 8), 1.0)
        self.leader.on_batch(wire.Batch(step, (wire.Group(step - 1, (sample,)),), batch_stats()))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "second"),
    [("simulated", 2), ("simulated", 1), pytest.param("real", 2, marks=[pytest.mark.engine, pytest.mark.chaos])],
)
def test_a_second_trainer_that_dies_while_the_first_rejoins_costs_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str, second: int
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.getcwd())
    if engine == "real":
        from tests.trainer.support import make_model

        make_model("qwen2", tmp_path / "model")
    side = Side(tmp_path, engine)

    async def script() -> None:
        await side.until(lambda: len(side.ready) == 3)
        for step in range(1, STEPS // 2 + 1):
            side.batch(step)
        await side.until(lambda: len(side.committed) >= 2)
        side.kill(3)
        await side.until(lambda: 3 not in side.ready)
        await side.until(lambda: 3 in side.ready)
        # Its join is ordered; the others are asked to meet it.
        side.kill(second)
        for step in range(STEPS // 2 + 1, STEPS + 1):
            side.batch(step)
        await side.until(lambda: len(side.committed) == STEPS)
        await side.until(lambda: any(isinstance(event, wire.TrainingDone) for event in side.events))

    side.play(script)
    assert [done.step for done in side.committed] == list(range(1, STEPS + 1)), "every step once"
    assert [index for done in side.committed for index in done.indices] == list(range(STEPS))
    assert not [event for event in side.events if isinstance(event, wire.Fatal)]
    assert side.listed == sorted(set(side.listed))
    assert side.listed
    (saved,) = side.run.checkpoints.iterdir()
    assert saved.name == f"step-{STEPS:06d}"
    position = read_position(saved)
    assert (position.step, position.low, len(position.reports)) == (STEPS, STEPS, STEPS)
    assert verify(saved) == ""
