"""Cost of the loop: rollout and training through leaders and agent halves against bare vLLM and Megatron.

    python -m bench.loop [--batches 40] [--repeat 3]

The bare loops get the same prompts and batches.  The parts run one after the other; rates are taken between 10 % and
90 % of the tokens, without start and tail.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from bench.harness import Rates, child, median, options, policy, rate, report, spread
from bench.rollout_side import PLANNER, TRAINER, LocalMesh, RolloutSide
from libra_hpc.agent.hosting.rollout_service import RolloutService
from libra_hpc.agent.node_carrier import NodeCarrier
from libra_hpc.agent.train_node import TrainNode
from libra_hpc.config.load import validate
from libra_hpc.config.run import RunConfig
from libra_hpc.facts.rundir import RunDir
from libra_hpc.protocol import agents as wire
from libra_hpc.protocol.engine import Abort, Generate
from libra_hpc.protocol.engine_state import EngineState
from libra_hpc.train_leader.train_leader_setup import make_train_leader
from tests.example_files import KEYCHAIN_TASK


def configuration(model: Path, batches: int) -> RunConfig:
    """The quickstart's shape with an open staleness gate, so that rollout never waits for training."""
    return validate(
        {
            "run": {"steps": batches},
            "model": {"path": str(model), "dtype": "float32"},
            "task": {"name": KEYCHAIN_TASK},
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


class RolloutRun(RolloutSide):
    """The rollout half of a run; batches are collected, not trained."""

    def __init__(self, config: RunConfig, run: RunDir) -> None:
        super().__init__(config, run)
        self.service = RolloutService(self.context)
        self.requests: dict[str, Generate] = {}
        self.lengths: dict[str, int] = {}
        self.points: Rates = []

    def on_turns(self, message: wire.Turns) -> None:
        self.requests |= {request.rid: request for _, request in message.items if not isinstance(request, Abort)}
        super().on_turns(message)

    def on_message(self, message: Any) -> None:
        if isinstance(message, wire.TurnsDone):
            self.lengths |= {generated.rid: len(generated.tokens) // 4 for _, generated in message.items}
            self.points.append((time.monotonic(), sum(self.lengths.values())))
        super().on_message(message)

    async def run(self, batches: int) -> None:
        assert self.service is not None
        reports = asyncio.create_task(self.service.run())
        await self.node.start()
        while len(self.batches) < batches:
            await asyncio.sleep(0.05)
        reports.cancel()
        await self.service.stop()
        await self.node.stop()


class TrainRun:
    """The training half of a run, fed with finished batches."""

    def __init__(self, config: RunConfig, run: RunDir) -> None:
        mesh = LocalMesh()
        context = mesh.context(TRAINER, config, run)
        folder = run.path / "rendezvous"
        folder.mkdir()
        carrier = NodeCarrier(context, lambda: None)
        self.node, self.leader = TrainNode(context, carrier), make_train_leader(context, folder)
        self.points: Rates = []
        self.done = asyncio.Event()
        mesh.handlers = {PLANNER: self._coordinator, TRAINER: self._agent}

    def _coordinator(self, message: Any) -> None:
        match message:
            case EngineState(state="ready"):
                self.leader.on_generation(1, (TRAINER,))
            case wire.StepReport(metrics=metrics):
                before = self.points[-1][1] if self.points else 0
                self.points.append((time.monotonic(), before + int(metrics["trained_tokens"])))
            case wire.TrainReport(done=int()):
                self.done.set()

    def _agent(self, message: Any) -> None:
        match message:
            case wire.ToReplica(message=order):
                self.node.on_message(order)
            case wire.FromReplica(rank=rank, message=answer):
                self.leader.on_reply(rank, answer)
            case wire.WeightsOffered():
                self.leader.on_offered(message)

    async def run(self, batches: Sequence[wire.Batch]) -> None:
        task = asyncio.create_task(self.leader.run())
        for batch in batches:
            self.leader.on_batch(batch)
        await self.node.start()
        await self.done.wait()
        task.cancel()
        await self.node.stop()


def once(config: RunConfig, folder: Path, batches: int) -> dict[str, tuple[float, float]]:
    """Tokens per second of rollout and of training: (through the loop, bare)."""

    def bare(part: str, payload: Any) -> float:
        """One of the bare loops in a process of its own, which releases its memory."""
        path = folder / part
        path.write_bytes(msgspec.msgpack.encode(payload))
        return float(child("-m", "bench.bare", part, msgspec.json.encode(config.as_data()).decode(), str(path)))

    run = RunDir.create(folder, "loop")
    rollout = RolloutRun(config, run)
    asyncio.run(rollout.run(batches))
    requests = [(request, rollout.lengths.get(rid)) for rid, request in rollout.requests.items()]
    direct = bare("vllm", [(request.prompt, length, request.temperature) for request, length in requests if length])

    async def train() -> Rates:
        training = TrainRun(config, run)
        await training.run(sorted(rollout.batches, key=lambda batch: batch.step))
        return training.points

    trained = rate(asyncio.run(train()))
    return {"rollout": (rate(rollout.points), direct), "training": (trained, bare("megatron", rollout.batches))}


def main() -> None:
    given = options("loop", __doc__, batches=40, repeat=3)
    config = configuration(policy(0), given.batches)
    results = []
    for _ in range(given.repeat):
        with tempfile.TemporaryDirectory(prefix="libra-bench-") as folder:
            results.append(once(config, Path(folder), given.batches))
    rows = []
    for name in ("rollout", "training"):
        ours, theirs = zip(*(result[name] for result in results), strict=True)
        ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
        rows.append([f"{name}, tokens/s", median(ours), median(theirs), spread(ratios)])
    notes = [
        f"{given.batches} batches of 64 trajectories, task keychain, 148 k parameters, fp32, one thread an engine;"
        f" medians of {given.repeat} runs.",
        "rollout: leader + agent half + environment host + tools against `add_request` of the same prompts and"
        " lengths, all at once.",
        "training: train leader + agent half, export of every step, snapshot of every fourth, against mcore's schedule"
        " and optimizer on the same packs.",
    ]
    columns = ["", "through the loop", "bare", "ratio, median (range)"]
    report(given, "What the loop costs", columns=columns, rows=rows, notes=notes, raw=results)


if __name__ == "__main__":
    main()
