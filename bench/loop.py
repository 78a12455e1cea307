"""Cost of the loop: rollout and training through leaders and agent halves against bare vLLM and Megatron.

    python bench/loop.py [--batches 40] [--repeat 3]

The bare loops get the same prompts and batches.  The parts run one after the other; rates are taken between 10 % and
90 % of the tokens, without start and tail.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.harness import LocalMesh, Rates, engine_environment, median, policy, rate, report
from libra_hpc.agent.hosting.rollout_service import RolloutService
from libra_hpc.agent.rollout_node import RolloutNode
from libra_hpc.agent.train_node import TrainNode
from libra_hpc.config.run import RunConfig
from libra_hpc.facts.rundir import RunDir
from libra_hpc.mesh.agent_context import AgentContext
from libra_hpc.mesh.rank_layout import RankLayout
from libra_hpc.process.agent_folders import make_folders
from libra_hpc.protocol import mesh as wire
from libra_hpc.protocol.codec import Codec
from libra_hpc.protocol.rollout import Generate
from libra_hpc.train_leader.train_leader import DataOrder, TrainLeader

LAYOUT = RankLayout(("planner", "train", "rollout"))


def configuration(model: Path, batches: int) -> RunConfig:
    """The quickstart's shape with an open staleness gate, so that rollout never waits for training."""
    return RunConfig.model_validate(
        {
            "run": {"steps": batches},
            "model": {"path": str(model), "dtype": "float32"},
            "task": {"name": "keychain"},
            "algorithm": {"eta": batches, "prompts_per_step": 8, "group_size": 8},
            "optimizer": {"lr": 3e-4},
            "checkpoint": {"every": 0},
            "rollout": {
                "max_model_len": 640,
                "kv_cache_mb": 64,
                "max_trajectories": 128,
                "max_inflight": 96,
                "max_num_seqs": 64,
            },
        }
    )


def make_context(config: RunConfig, run: RunDir, rank: int, mesh: LocalMesh) -> AgentContext:
    """A context without MPI."""
    private, shared = make_folders()
    return AgentContext(
        rank=rank,
        layout=LAYOUT,
        config=config,
        run=run,
        attempt=1,
        send=mesh.send,
        start=wire.Welcome(0, "", 0, ()),
        private=private,
        shared_memory=shared,
    )


class RolloutRun:
    """The rollout half of a run; batches are collected, not trained."""

    def __init__(self, config: RunConfig, run: RunDir) -> None:
        self.mesh = LocalMesh()
        self.context = make_context(config, run, 2, self.mesh)
        self.node, self.service = RolloutNode(self.context), RolloutService(self.context)
        self.requests: dict[str, Generate] = {}
        self.lengths: dict[str, int] = {}
        self.points: Rates = []
        self.batches: list[wire.Batch] = []
        self.tokens = 0
        self.mesh.handlers = {1: self._trainer, 2: self._agent}

    def _trainer(self, message: Any, blob: bytes) -> None:
        if isinstance(message, wire.WeightsWanted):
            self.mesh.send(2, wire.WeightsCurrent(message.have))
        elif isinstance(message, wire.Batch):
            self.batches.append(message)

    def _agent(self, message: Any, blob: bytes) -> None:
        match message:
            case wire.Turns(items=items):
                self.requests.update((request.rid, request) for _, request in items)
                self.node.on_turns(message)
            case wire.WeightsCurrent():
                self.node.on_current(message)
            case wire.TurnsDone(items=items):
                for _, generated in items:
                    self.lengths[generated.rid] = len(generated.tokens) // 4
                    self.tokens += self.lengths[generated.rid]
                self.points.append((time.monotonic(), self.tokens))
                self.service.on_message(message)
            case _:
                self.service.on_message(message)

    async def run(self, batches: int) -> None:
        """Run to the last batch."""
        report_task = asyncio.create_task(self.service.run())
        await self.node.start()
        while len(self.batches) < batches:
            await asyncio.sleep(0.05)
        report_task.cancel()
        await self.service.stop()
        await self.node.stop()


class TrainRun:
    """The training half of a run, fed with finished batches."""

    def __init__(self, config: RunConfig, run: RunDir) -> None:
        self.mesh = LocalMesh()
        context = make_context(config, run, 1, self.mesh)
        self.node = TrainNode(context)
        folder = run.path / "rendezvous"
        folder.mkdir()
        run.checkpoints.mkdir()

        async def saved(*checkpoint: Any) -> None:
            pass

        self.leader = TrainLeader(
            config=config,
            core=(1,),
            step=0,
            order=DataOrder(),
            send=self.mesh.send,
            rollout_leader=2,
            receivers=lambda: (),
            saved=saved,
            rendezvous=folder,
            checkpoints=run.checkpoints,
        )
        self.points: Rates = []
        self.done = asyncio.Event()
        self.mesh.handlers = {0: self._coordinator, 1: self._agent}

    def _coordinator(self, message: Any, blob: bytes) -> None:
        match message:
            case wire.EngineIsReady():
                self.leader.on_generation(1, (1,))
            case wire.StepReport(metrics=metrics):
                self.points.append(
                    (time.monotonic(), (self.points[-1][1] if self.points else 0) + int(metrics["trained_tokens"]))
                )
            case wire.TrainingFinished():
                self.done.set()

    def _agent(self, message: Any, blob: bytes) -> None:
        match message:
            case wire.ToReplica(message=order):
                self.node.on_message(order)
            case wire.FromReplica(rank=rank, message=answer):
                self.leader.on_reply(rank, answer)
            case wire.Publish():
                self.node.on_publish(message)

    async def run(self, batches: list[wire.Batch]) -> None:
        """Train every batch once."""
        task = asyncio.create_task(self.leader.run())
        for batch in batches:
            self.leader.on_batch(batch)
        await self.node.start()
        await self.done.wait()
        task.cancel()
        await self.node.stop()


def child(part: str, config: RunConfig, payload: Path) -> float:
    """Run one of the bare loops in a separate process; returns its rate."""
    argv = [sys.executable, str(Path(__file__).with_name("bare.py")), part, config.model_dump_json(), str(payload)]
    output = subprocess.run(
        argv, check=True, env=engine_environment(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ).stdout
    return float(json.loads(output.splitlines()[-1])["tokens_per_s"])


def once(config: RunConfig, folder: Path, batches: int) -> tuple[float, float, float, float]:
    """(loop rollout, direct vLLM, loop training, bare Megatron), tokens per second."""
    run = RunDir.create(folder, "loop")
    rollout = RolloutRun(config, run)
    asyncio.run(rollout.run(batches))
    requests = [
        (request, rollout.lengths[rid]) for rid, request in rollout.requests.items() if rollout.lengths.get(rid)
    ]
    (folder / "requests").write_bytes(Codec(Any).encode([[r.prompt, n, r.temperature] for r, n in requests]))
    direct = child("vllm", config, folder / "requests")

    async def train() -> TrainRun:
        training = TrainRun(config, run)
        await training.run(sorted(rollout.batches, key=lambda b: b.step))
        return training

    training = asyncio.run(train())
    (folder / "batches").write_bytes(Codec(Any).encode(rollout.batches))
    bare = child("megatron", config, folder / "batches")
    return rate(rollout.points), direct, rate(training.points), bare


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batches", type=int, default=40)
    parser.add_argument("--repeat", type=int, default=3)
    arguments = parser.parse_args()
    config = configuration(policy(0), arguments.batches)
    results = []
    for _ in range(arguments.repeat):
        with tempfile.TemporaryDirectory(prefix="libra-bench-") as folder:
            results.append(once(config, Path(folder), arguments.batches))
    columns = list(zip(*results, strict=True))
    rows = []
    for name, ours, theirs in (
        ("rollout, tokens/s", columns[0], columns[1]),
        ("training, tokens/s", columns[2], columns[3]),
    ):
        ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
        rows.append([name, median(ours), median(theirs), median(ratios), f"{min(ratios):.2f}..{max(ratios):.2f}"])
    notes = [
        (
            f"{arguments.batches} batches of 64 trajectories, task keychain, 148 k parameters, fp32, one thread an"
            f" engine; medians of {arguments.repeat} runs."
        ),
        (
            "rollout: leader + agent half + environment host + tools against `add_request` of the same prompts and"
            " lengths, all at once."
        ),
        (
            "training: train leader + agent half, export of every step, snapshot of every fourth, against mcore's"
            " schedule and optimizer on the same packs."
        ),
    ]
    report(
        "loop",
        title="What the loop costs",
        columns=["", "through the loop", "bare", "ratio (median)", "ratio (range)"],
        rows=rows,
        notes=notes,
        raw=results,
    )


if __name__ == "__main__":
    main()
