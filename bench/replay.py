"""Real engines that replay workloads: production leader, agent half, engines and environment host without MPI.

The engines live as long as `Replayer`; every `play` has its own leader, policy and environment host.  Four things are
not production code:

* Messages between agents stay in this process.
* A turn's ``max_tokens`` is set to the length in the workload; turns have no stop ids, so they end there.
* A running turn is not interrupted: it ends where it is.
* The model has random weights, since lengths are set by the workload.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from bench.harness import POLICIES, ROOT, child
from libra_hpc.agent.hosting.rollout_service import RolloutService
from libra_hpc.agent.node_carrier import NodeCarrier
from libra_hpc.agent.rollout_node import RolloutNode
from libra_hpc.config.load import validate
from libra_hpc.config.run import RunConfig
from libra_hpc.engine.steplog import StepLogHeader, read_steps
from libra_hpc.errors import OperationError
from libra_hpc.facts.rundir import RunDir, read_lines
from libra_hpc.mesh.agent_context import AgentContext, RankLayout
from libra_hpc.models.step_times.measured import StepPoint
from libra_hpc.process.agent_folders import make_folders
from libra_hpc.protocol import agents as wire
from libra_hpc.protocol.engine import Abort
from libra_hpc.protocol.layout import ResumePoint
from libra_hpc.protocol.trace import TrajectoryRecord, TurnRecord, recorded

LAYOUT = RankLayout(("planner", "train", "rollout"))
TRAINER, NODE = 1, 2
GROUP_SIZE = 4
LAYERS, HIDDEN = 6, 256
"""Shape of the model; with a smaller one, leader and environment would dominate the run."""
PATIENCE_S = 600.0
"""Longest play, about ten times the longest one of an idle machine."""
POLL_S = 0.02
SETTLE_S = 0.3
"""Wait after the last answer for the last steps in the engines' logs."""


def model() -> Path:
    """The model's folder, made once, in a process of its own: torch's threads would disturb a measurement."""
    folder = POLICIES / f"simulated-{LAYERS}x{HIDDEN}"
    if not (folder / "config.json").exists():
        child("-c", f"from bench.replay import make_model; make_model({str(folder)!r}); print(0)")
    return folder


def make_model(folder: str) -> None:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from tests.example_files import write_keychain_tokenizer

    torch.manual_seed(0)
    write_keychain_tokenizer(Path(folder))
    sizes: dict[str, Any] = {"vocab_size": 128, "hidden_size": HIDDEN, "intermediate_size": 4 * HIDDEN}
    sizes |= {"num_hidden_layers": LAYERS, "num_attention_heads": HIDDEN // 64, "num_key_value_heads": 2}
    config = Qwen2Config(max_position_embeddings=4096, tie_word_embeddings=False, **sizes)
    Qwen2ForCausalLM(config).save_pretrained(folder)  # type: ignore[no-untyped-call]


def tool_turn(new: int, generated: int, tool_s: float, last: bool) -> TurnRecord:
    """A turn that ends with a tool, unless it is the last one."""
    if last:
        return TurnRecord(new, generated)
    return TurnRecord(new, generated, tool="tool", outcome="ok", tool_s=tool_s)


class TurnTimes(msgspec.Struct, frozen=True):
    """One turn of a real run; seconds, the first three of `time.time`."""

    ready: float
    sent: float
    answered: float
    queue_s: float
    """In the engine, before its first step."""
    run_s: float
    """In the engine, from there to the last token."""
    env_s: float = 0.0
    """From the answer to the next ready turn, without the tool's seconds; 0 for the last turn."""


class Played(msgspec.Struct, frozen=True):
    """A real run in the terms of the simulator."""

    makespan_s: float
    turns: list[TurnTimes]
    steps: list[StepPoint]
    """Of all engines."""
    header: StepLogHeader
    load: float
    """Load average of the machine at the start; above 0.5 another job uses it."""
    recomputed: int = 0
    """Context tokens computed again in later turns."""


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    model: Path
    engines: int = 2
    max_model_len: int = 4096
    max_num_seqs: int = 32
    max_inflight: int = 48
    kv_cache_mb: int = 64

    def config(self, work: Path, *, groups: int, open_groups: int, policy: str, seed: int = 0) -> RunConfig:
        task = f"{ROOT}/bench/replay_task.py:Replay"
        return validate(
            {
                "run": {"steps": 1, "seed": seed},
                "model": {"path": str(self.model), "dtype": "float32"},
                "task": {"name": task, "options": {"work": str(work), "group_size": GROUP_SIZE}},
                "algorithm": {"eta": 0, "prompts_per_step": groups, "group_size": GROUP_SIZE},
                "rollout": {
                    "engines_per_node": self.engines,
                    "policy": policy,
                    "max_model_len": self.max_model_len,
                    "max_num_seqs": self.max_num_seqs,
                    "max_inflight": self.max_inflight,
                    "kv_cache_mb": self.kv_cache_mb,
                    "max_trajectories": open_groups * GROUP_SIZE,
                    "record_steps": True,
                },
            }
        )


class Replayer:
    """A context in which the engines are up; `play` any number of times, one after the other."""

    def __init__(self, setup: Setup, folder: Path) -> None:
        self.setup, self._folder, self._folders = setup, folder, make_folders()
        config = setup.config(folder / "none", groups=1, open_groups=1, policy="least_loaded")
        self._context = self._of_agent(config, RunDir.create(folder, "engines"))
        self._node = RolloutNode(self._context, NodeCarrier(self._context, lambda: None))
        self._service: RolloutService | None = None
        self._work: list[TrajectoryRecord] = []
        self._asked: dict[str, int] = {}
        self._answers: dict[str, list[tuple[float, float, float]]] = {}
        self._plays, self._ended = 0, False

    def _of_agent(self, config: RunConfig, run: RunDir) -> AgentContext:
        resumed, (private, shared) = ResumePoint(0, "", 0, ()), self._folders
        return AgentContext(NODE, LAYOUT, config, run, 1, self._send, resumed, private=private, shared_memory=shared)

    async def __aenter__(self) -> Replayer:
        await self._node.start()
        await self._until(lambda: self._node.serves, "the engines did not start", self._context.logs)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._node.stop()
        for folder in self._folders:
            shutil.rmtree(folder, ignore_errors=True)

    async def _until(self, condition: Callable[[], bool], problem: str, where: Path) -> None:
        """Wait; raises `OperationError` after `PATIENCE_S`."""
        began = time.monotonic()
        while not condition():
            if time.monotonic() - began > PATIENCE_S:
                raise OperationError(f"{problem} in {PATIENCE_S:.0f} s; see {where}")
            await asyncio.sleep(POLL_S)

    async def play(self, work: list[TrajectoryRecord], policy: str, open_groups: int) -> Played:
        """Run a workload of equally large, contiguous groups, at most ``open_groups`` at once."""
        self._plays += 1
        groups = len({spec.prompt_id for spec in work})
        self._work = work
        run = RunDir.create(self._folder, "play")
        path = run.path / "work.json"
        path.write_bytes(msgspec.json.encode(work))
        # A new seed, so that the prefix caches have nothing of an earlier play.
        config = self.setup.config(path, groups=groups, open_groups=open_groups, policy=policy, seed=self._plays)
        self._asked, self._answers, self._ended = {}, {}, False
        load = os.getloadavg()[0]
        seen = {name: len(read_steps(self._log(name))[1]) for name in self._node.observed}
        self._service = RolloutService(self._of_agent(config, run))
        self._service.leader.on_engines(NODE, self._node.observed)
        reports = asyncio.create_task(self._service.run())
        try:
            problem = f"a play of {len(work)} trajectories did not end"
            await self._until(lambda: self._ended, problem, run.path)
            await asyncio.sleep(SETTLE_S)
        finally:
            reports.cancel()
            await self._service.stop()
            self._service = None
        found = [read_steps(self._log(name), first) for name, first in seen.items()]
        turns, makespan_s = self._match(run)
        served = [turn for one in recorded(run.trajectories) for turn in one.turns]
        return Played(
            makespan_s=makespan_s,
            turns=turns,
            steps=[point for _, points in found for point in points],
            header=found[0][0],
            load=load,
            recomputed=sum(turn.recomputed for turn in served),
        )

    # --- messages

    def _send(self, rank: int, message: Any) -> None:
        """The mesh: deliver to a rank that is here, one pass of the event loop later."""
        handlers = {TRAINER: self._to_trainer, NODE: self._to_node}
        if rank in handlers:
            asyncio.get_running_loop().call_soon(handlers[rank], message)

    def _to_trainer(self, message: Any) -> None:
        if isinstance(message, wire.WeightsWanted):
            self._send(NODE, wire.WeightsCurrent(message.have))
        self._ended |= isinstance(message, wire.Batch)

    def _to_node(self, message: Any) -> None:
        match message:
            case wire.Turns(items=items):
                asked = [(name, self._imposed(one)) for name, one in items if not isinstance(one, Abort)]
                self._node.on_turns(wire.Turns(tuple(asked)))
                return
            case wire.WeightsCurrent():
                self._node.on_current(message)
                return
            case wire.TurnsDone(items=items):
                now = time.time()
                for _, answer in items:
                    times = self._answers.setdefault(answer.rid.partition(":")[0], [])
                    times.append((now, answer.queue_s, answer.run_s))
        if self._service is not None:
            self._service.on_message(message)

    def _imposed(self, request: Any) -> Any:
        episode = request.rid.partition(":")[0]
        number = self._asked[episode] = self._asked.get(episode, -1) + 1
        return msgspec.structs.replace(request, max_tokens=self._spec(episode).turns[number].gen_tokens)

    def _spec(self, episode: str) -> TrajectoryRecord:
        index, sample, attempt = map(int, episode.split("."))
        if attempt:
            raise OperationError(f"trajectory {episode} was restarted: what was replayed is not the workload any more")
        return self._work[index * GROUP_SIZE + sample]

    # --- results

    def _match(self, run: RunDir) -> tuple[list[TurnTimes], float]:
        """Times of all turns, from the alternating decisions and answers of each trajectory; and the makespan."""
        decisions: dict[str, list[dict[str, Any]]] = {}
        for line in read_lines(run.decisions):
            decisions.setdefault(line["trajectory"], []).append(line)
        turns = []
        for episode, routed in decisions.items():
            spec, answers = self._spec(episode), self._answers[episode]
            if not len(routed) == len(answers) == len(spec.turns):
                counts = f"{len(routed)} decisions and {len(answers)} answers for {len(spec.turns)} turns"
                raise OperationError(f"trajectory {episode}: {counts}")
            for number, (line, (at, queue_s, run_s)) in enumerate(zip(routed, answers, strict=True)):
                last = number + 1 == len(routed)
                env_s = 0.0 if last else _ready(routed[number + 1]) - at - spec.turns[number].tool_s
                turns.append(TurnTimes(_ready(line), line["t"], at, queue_s, run_s, env_s))
        ends = [one.finished_at for one in recorded(run.trajectories)]
        if len(ends) != len(self._work):
            raise OperationError(f"{len(ends)} trajectories ended, {len(self._work)} were to be played")
        return turns, max(ends) - min(turn.ready for turn in turns)

    def _log(self, engine: str) -> Path:
        return self._context.logs / f"{engine}.steps.jsonl"


def _ready(decision: dict[str, Any]) -> float:
    return float(decision["t"] - decision["waited_s"])
